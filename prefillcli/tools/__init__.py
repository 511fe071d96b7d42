"""The other commands: clients of the parts of a job."""
