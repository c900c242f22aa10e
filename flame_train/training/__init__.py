"""The training loop and the parts of a step. It knows no model family."""
