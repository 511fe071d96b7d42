"""The options of jobs, their values, and where they come from."""
