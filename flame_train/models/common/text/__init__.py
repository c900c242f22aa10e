"""Text encoders that several families share: networks, names in files, loading, and their side of the conditioning."""
