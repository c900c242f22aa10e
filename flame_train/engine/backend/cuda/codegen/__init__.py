"""Generators of kernels: from expressions over elements, rows or columns to CUDA C."""
