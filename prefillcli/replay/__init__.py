"""What an online server would make of the papers' workloads on this machine, beside the offline plan."""
