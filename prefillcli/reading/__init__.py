"""Cheaper ways to read prompts."""
