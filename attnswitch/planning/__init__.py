"""Which backend computes a problem, and why."""
