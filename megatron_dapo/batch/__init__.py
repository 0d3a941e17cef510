"""Room `batch`."""
