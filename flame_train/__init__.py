"""flame-train: LoRA training for diffusion models without PyTorch."""

__version__ = "0.1.0"
