"""Decoding after the walk: tokens after the prompts of a pack."""
