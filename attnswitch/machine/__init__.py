"""What computes: devices, the contract of a backend, the table of backends, what they are known to get wrong."""
