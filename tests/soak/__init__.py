"""A night of a job that is killed over and over: `python -m tests.soak`."""
