"""What ``cuda`` and ``triton`` both have, and what backends have that are called through torch."""
