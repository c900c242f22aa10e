"""Qwen-Image 1's network, its names in files, and how both are found."""
