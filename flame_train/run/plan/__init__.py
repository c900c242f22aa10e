"""Stage 2, plan: the dataset in its buckets, the order of samples, and what is to be encoded."""
