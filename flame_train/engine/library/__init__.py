"""Ops and layers that PyTorch has and nothing in the trainer uses. `engine/lazy.py` loads them when asked for."""
