"""Decoding behind the walk: tokens after the prompts of a pack."""
