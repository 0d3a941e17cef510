"""Room `resharding`."""
