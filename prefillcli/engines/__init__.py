"""Engines: planned tokens in, label log-probabilities out."""
