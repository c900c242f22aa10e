"""FLUX.3's network, its names in files, and how both are found."""
