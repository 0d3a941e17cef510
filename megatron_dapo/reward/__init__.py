"""Room `reward`."""
