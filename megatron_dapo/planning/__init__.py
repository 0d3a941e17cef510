"""Room `planning`."""
