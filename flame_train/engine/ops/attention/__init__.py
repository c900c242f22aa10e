"""Attention, and the kernels that it may take."""
