"""NVIDIA's libraries as the kernels call them, and how they are found."""
