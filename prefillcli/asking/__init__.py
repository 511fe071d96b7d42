"""Asking: the question to each row."""
