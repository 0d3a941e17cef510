"""Room `loss`."""
