"""A very small SDXL with random weights, as a file: what tests train that need every kind of layer and no picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from flame_train.io.safetensors import save_file
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder


def tiny_unet(blocks: int = 2) -> UNetArch:
    """Two levels, one transformer block each time: enough for every kind of layer SDXL has.

    With other `blocks` a level than SDXL's two, files of LoRAs have no names for layers on the way down.
    """
    arch = UNetArch.tiny(model_channels=16, context_dim=16, pooled_dim=8)
    return replace(arch, channel_mult=(1, 2), transformer_depth=(0, 1), num_res_blocks=blocks)


def write_tiny_sdxl(path: Path, seed: int = 0, blocks: int = 2) -> None:
    """A single-file SDXL checkpoint with random weights."""
    rng = np.random.default_rng(seed)
    parts = {
        "model.diffusion_model.": UNet(tiny_unet(blocks)),
        "first_stage_model.": Vae(VaeArch.tiny(8)),
        "conditioner.embedders.0.transformer.": ClipTextEncoder(ClipArch.tiny("quick_gelu", None, 8)),
        "conditioner.embedders.1.model.": ClipTextEncoder(ClipArch.tiny("gelu", 8, 8)),
    }
    tensors = {}
    for prefix, model in parts.items():
        model.init(rng)
        tensors |= {prefix + name: weight.numpy().astype(np.float16) for name, weight in model.weights()}
    save_file(path, tensors)
