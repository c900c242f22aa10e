"""What ops of all kinds share: dims, conditions of kernels, conversions, generators of kernels."""
