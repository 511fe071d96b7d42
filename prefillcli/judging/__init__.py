"""Judges: the worth of the answers."""
