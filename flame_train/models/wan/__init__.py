"""Wan 2.2: the denoiser of films, of which a still is one frame, and its names in files."""
