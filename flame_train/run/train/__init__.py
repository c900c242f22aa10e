"""Stage 4, train: from the last checkpoint to the last step, with its sample grids."""
