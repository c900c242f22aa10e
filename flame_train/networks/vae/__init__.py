"""Autoencoders that several families share: networks, names in files, latents, and tiles."""
