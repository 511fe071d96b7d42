"""Speculation: tokens are guessed by drafters, and the model checks several in one pass."""
