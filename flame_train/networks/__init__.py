"""What networks share: blocks, attention, positions, streamed weights, autoencoders, and how their files are opened."""
