"""Room `data`."""
