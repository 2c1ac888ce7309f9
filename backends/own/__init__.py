"""What ``cuda`` and ``triton`` both have."""
