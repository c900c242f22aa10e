"""Other shapes and orders of the same elements."""
