"""The run as data, and what a person sees of it."""
