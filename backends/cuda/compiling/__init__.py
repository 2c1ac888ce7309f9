"""A kernel's sources and all that it is compiled for, to a cubin: by NVRTC, or out of a pack or the cache."""
