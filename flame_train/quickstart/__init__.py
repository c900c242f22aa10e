"""`flame-train quickstart`: makes a small dataset and base model, and trains a LoRA on them."""
