"""A model: found on disk, checked, loaded; its shape, and the cost of that in memory and operations."""
