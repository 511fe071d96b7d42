"""Compression: fewer tokens."""
