"""Stage 5, finish: the LoRA files with their metadata."""
