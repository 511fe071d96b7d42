"""The cost of a job, predicted before and while it runs."""
