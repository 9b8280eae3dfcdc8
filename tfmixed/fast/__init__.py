"""Fused kernels, and the choice of what is compiled."""
