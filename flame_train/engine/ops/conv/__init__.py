"""Convolutions, pooling and resizing."""
