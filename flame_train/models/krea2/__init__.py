"""Krea 2's network, its names in files, and how both are found."""
