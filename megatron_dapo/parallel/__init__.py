"""Room `parallel`."""
