"""Room `rollout`."""
