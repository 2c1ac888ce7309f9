"""Attention in CUDA C++, compiled by NVRTC at the first call and launched through CuPy."""
