"""The kernels, one step of the algorithm in each file."""
