"""Small SD3.5 and Flux models with random weights: the true structure and names, to show that everything works.

They know nothing: what they draw is noise, and a LoRA on them learns only to guess the velocity better.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.engine import nn
from flame_train.io.durable import write_durably
from flame_train.io.safetensors import save_file
from flame_train.models.clip import ClipArch, ClipTextEncoder
from flame_train.models.flux import Flux, FluxArch
from flame_train.models.mmdit_sd3 import Mmdit, MmditArch
from flame_train.models.t5 import T5Arch, T5Encoder
from flame_train.models.vae import Vae, VaeArch

_WIDTH = 32
_WORDS: Final = (
    "a",
    "an",
    "and",
    "in",
    "on",
    "of",
    "the",
    "with",
    "photo",
    "picture",
    "circle",
    "square",
    "red",
    "blue",
)


def small_sd3() -> Mapping[str, nn.Module]:
    """SD3.5's parts by their prefix in a single file, all encoders inside."""
    arch = MmditArch(
        width=64, depth=2, head_dim=32, context_dim=2 * _WIDTH, pooled_dim=2 * _WIDTH, positions=16, qk_norm=True,
        dual=(0,),
    )  # fmt: skip
    clip_g = ClipTextEncoder(ClipArch.tiny("gelu", _WIDTH, _WIDTH))
    return {"model.diffusion_model.": Mmdit(arch), "text_encoders.clip_g.transformer.": clip_g, **_shared()}


def small_flux() -> Mapping[str, nn.Module]:
    """Flux.1 dev's parts by their prefix in a single file, all encoders inside."""
    arch = FluxArch.tiny(context_dim=2 * _WIDTH, pooled_dim=_WIDTH)
    return {"model.diffusion_model.": Flux(arch), **_shared()}


def _shared() -> dict[str, nn.Module]:
    return {
        "first_stage_model.": Vae(VaeArch.tiny(latent_channels=16)),
        "text_encoders.clip_l.transformer.": ClipTextEncoder(ClipArch.tiny("quick_gelu", None, _WIDTH)),
        "text_encoders.t5xxl.transformer.": T5Encoder(T5Arch.tiny(width=2 * _WIDTH)),
    }


def write_small(networks: Mapping[str, nn.Module], folder: Path, seed: int) -> Path:
    """Writes `base.safetensors`, fp16, and T5's `tokenizer.json` beside it; returns the checkpoint's path."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for prefix, network in networks.items():
        network.init(rng, "float16")
        tensors |= {prefix + name: np.ascontiguousarray(t.numpy()) for name, t in network.weights()}
    save_file(folder / "base.safetensors", tensors, {"modelspec.title": "a small model with random weights"})
    write_vocabulary(folder)
    return folder / "base.safetensors"


def write_vocabulary(folder: Path) -> None:
    """Writes a `tokenizer.json` of T5's kind that knows letters and a few words."""
    raw = json.dumps(_vocabulary()).encode()
    write_durably(folder / "tokenizer.json", [raw], len(raw))


def _vocabulary() -> dict[str, Any]:
    """Letters and a few words, in the form of `tokenizers`; a word is likelier than its letters."""
    special = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0]]
    letters = [[c, -6.0] for c in ("\u2581", *string.ascii_letters, *string.digits, *string.punctuation)]
    words = [[f"\u2581{word}", -4.0] for word in _WORDS]
    return {"version": "1.0", "model": {"type": "Unigram", "unk_id": 2, "vocab": [*special, *letters, *words]}}
