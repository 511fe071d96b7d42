"""What a job will take, before and while it runs."""
