"""The networks, one file each, named as their published checkpoints name them."""
