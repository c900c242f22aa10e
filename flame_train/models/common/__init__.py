"""Networks that several families share, and how a family's files are opened."""
