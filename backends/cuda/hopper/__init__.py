"""Hopper's family: 16-bit types on compute capability 9.0, by TMA and products of whole warpgroups."""
