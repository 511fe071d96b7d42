"""The composition of a job, its steps, the loop over windows, workers."""
