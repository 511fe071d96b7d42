"""What jobs can be told: options, their values, and where they come from."""
