"""Stage 3, encode: images and captions to cached arrays."""
