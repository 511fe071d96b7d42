"""A model on disk: found, checked, weighed, loaded."""
