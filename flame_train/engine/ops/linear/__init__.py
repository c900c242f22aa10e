"""Matrix products, low-rank updates and 8-bit weights."""
