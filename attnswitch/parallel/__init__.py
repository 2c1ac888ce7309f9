"""Context parallelism: one sequence over several ranks. Who holds what, what is left to compute, and the two ways."""
