"""Room `device`."""
