"""Sums, extrema and tests over dims."""
