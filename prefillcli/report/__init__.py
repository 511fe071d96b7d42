"""The run as data, and its presentation to people."""
