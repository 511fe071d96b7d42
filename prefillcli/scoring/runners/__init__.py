"""Several workers for one job: processes on this machine, or actors on a cluster."""
