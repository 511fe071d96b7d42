"""A model: found on disk, checked, loaded; its shape, and what that costs in memory and operations."""
