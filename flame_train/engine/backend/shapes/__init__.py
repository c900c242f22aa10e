"""A GPU that is described rather than there: the CUDA backend runs a step on shapes, and its memory is added up."""
