"""The two ends of a family's autoencoder: pictures to latent moments, latents to pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.config.schema import Config
from flame_train.engine import Tensor, tensor
from flame_train.errors import ConfigError
from flame_train.models.family_files import FamilyFiles
from flame_train.models.vae import Vae
from flame_train.training.family import Example, base_model_path


def vae_place(config: Config, files: FamilyFiles) -> Path:
    """The file or folder of the VAE: its own, or the checkpoint. Raises ConfigError where neither has one."""
    base = base_model_path(config)
    if not config.model.vae and "vae" not in files.holds(base):
        raise ConfigError(lacks(base, "vae"))
    return Path(config.model.vae) if config.model.vae else base


def lacks(base: Path, option: str) -> str:
    """What to tell of a network that has no file of its own and that the checkpoint does not hold."""
    return f"model.{option}: {base} holds no such network; name its file, as published beside the checkpoint"


def moments(vae: Vae, pixels: np.ndarray[Any, Any], device: str) -> Example:
    """`mean` and `logvar` (H / 8, W / 8, Z), fp32, of uint8 RGB pixels (H, W, 3)."""
    scaled = pixels.astype(np.float32)[None] / 127.5 - 1.0
    mean, logvar = vae.encode_moments(tensor(scaled, vae.dtype, device))
    return {"mean": mean.float().numpy()[0], "logvar": logvar.float().numpy()[0]}


def decoder(vae: Vae) -> Callable[[Tensor], np.ndarray[Any, Any]]:
    """Latents (B, h, w, Z) as a denoiser sees them to uint8 RGB pixels (B, H, W, 3)."""

    def decode(latents: Tensor) -> np.ndarray[Any, Any]:
        pixels = vae.decode(latents.to(vae.dtype)).float().numpy()
        return np.rint((np.clip(pixels, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)

    return decode
