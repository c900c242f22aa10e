"""A small base model with SDXL's layout, made by code: random weights, except for an autoencoder that works.

It has never seen a picture, so what it draws by itself is abstract. It serves to show, and to test, the whole way
from a checkpoint to a LoRA within a minute and without a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.engine import nn
from flame_train.io.safetensors import save_file
from flame_train.models.clip import ClipArch, ClipTextEncoder
from flame_train.models.keys.sdxl_text import clip_from_openclip
from flame_train.models.unet_sdxl import UNet, UNetArch
from flame_train.models.vae import Vae, VaeArch

from . import small_vae

Array = np.ndarray[Any, Any]
Weights = Mapping[str, Array]

_TEXT_WIDTH: Final = 32
_SEED: Final = 2307_01952
_PAIRED: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # s and -s side by side: each norm's group then has mean 0


class _Arrays:
    """Named arrays as a source for a key map."""

    def __init__(self, arrays: Weights) -> None:
        self._arrays = arrays

    def read(self, name: str) -> Array:
        return self._arrays[name]


def write_small_base(path: Path) -> int:
    """Writes the checkpoint, fp16, under the published single file's names. Returns the number of weights.

    The same bytes every time. Raises OutputError.
    """
    rng = np.random.default_rng(_SEED)
    clip_l = ClipTextEncoder(ClipArch.tiny("quick_gelu", width=_TEXT_WIDTH))
    bigg = ClipTextEncoder(ClipArch.tiny("gelu", _TEXT_WIDTH, _TEXT_WIDTH))
    unet = UNet(UNetArch.tiny(context_dim=2 * _TEXT_WIDTH, pooled_dim=_TEXT_WIDTH))
    vae = Vae(VaeArch.tiny())
    parts = {
        "model.diffusion_model.": _unet_weights(unet, rng),
        "first_stage_model.": small_vae.weights(vae.arch, vae.shapes()),
        "conditioner.embedders.0.transformer.": _text_weights(clip_l, rng),
        "conditioner.embedders.1.model.": _openclip(_text_weights(bigg, rng)),
    }
    tensors = {prefix + name: _half(array) for prefix, part in parts.items() for name, array in part.items()}
    save_file(path, tensors, {"modelspec.title": "small random SDXL-layout base of flame-train's quickstart"})
    return sum(array.size for array in tensors.values())


def _unet_weights(unet: UNet, rng: np.random.Generator) -> Weights:
    """Random, but arranged so that the network at first takes all that it sees for noise, which is a fair start.

    The noised latents go both ways round, as s and -s, into the first eight channels, along the outermost skip
    connection to the last block, and out: silu(s) - silu(-s) is s, and the last norm finds them at unit variance
    already. Residual branches are weak, as in a network whose training begins.
    """
    made = _random(unet, rng)
    for name, array in made.items():
        if name.endswith(("out_layers.3.weight", "proj_out.weight")):
            array *= 0.3
    latents, width = unet.arch.in_channels, unet.arch.model_channels
    both = np.concatenate([np.eye(latents), -np.eye(latents)])[_PAIRED]
    first, skip, last = (
        made[f"{n}.weight"] for n in ("input_blocks.0.0", "output_blocks.8.0.skip_connection", "out.2")
    )
    first[: 2 * latents] = 0.0
    first[: 2 * latents, :, 1, 1] = both
    skip[: 2 * latents] = 0.0
    skip[: 2 * latents, width : width + 2 * latents, 0, 0] = np.eye(2 * latents)
    last[:] = 0.0
    last[:, : 2 * latents, 1, 1] = both.T
    return made


def _text_weights(encoder: ClipTextEncoder, rng: np.random.Generator) -> Weights:
    """Random; with embeddings of about 1, as trained encoders' hidden states are, so that words tell apart."""
    made = _random(encoder, rng)
    made["text_model.embeddings.token_embedding.weight"] *= 50.0
    return made


def _random(module: nn.Module, rng: np.random.Generator) -> dict[str, Array]:
    module.init(rng)
    return {name: np.array(weight.numpy()) for name, weight in module.weights()}


def _openclip(arrays: Weights) -> Weights:
    sources = clip_from_openclip().inverse.pull(arrays).sources
    return {name: source.read(_Arrays(arrays)) for name, source in sources.items()}


def _half(array: Array) -> Array:
    return np.ascontiguousarray(array, np.float16)
