"""Tensors: what they are, what can be computed with them by name, how they are made, printed, copied and saved."""
