"""The one training loop, and what a step consists of. It knows no model family."""
