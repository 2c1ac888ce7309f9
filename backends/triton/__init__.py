"""Attention in Triton: forward, backward by recomputation, and split keys for few queries."""
