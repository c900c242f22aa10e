"""Several processes that train together, one a GPU: who they are, how they add up gradients, how they end together."""
