"""Heads that users fit to right answers: they answer after a middle layer."""
