"""The commands besides training, a file for each."""
