"""Room `checkpoint`."""
