"""Names of Stable Diffusion 1 and 2 in files, and how both are found; the network is SDXL's."""
