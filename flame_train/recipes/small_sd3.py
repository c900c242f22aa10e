"""A small SD3.5 with random weights: the true structure and names, for a run that shows that everything works.

It knows nothing: what it draws is noise, and a LoRA on it learns only to guess the velocity better.
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


def networks() -> Mapping[str, nn.Module]:
    """The parts by their prefix in a single file."""
    return {
        "model.diffusion_model.": Mmdit(
            MmditArch(
                width=64, depth=2, head_dim=32, context_dim=2 * _WIDTH, pooled_dim=2 * _WIDTH, positions=16,
                qk_norm=True, dual=(0,),
            )
        ),
        "first_stage_model.": Vae(VaeArch.tiny(latent_channels=16)),
        "text_encoders.clip_l.transformer.": ClipTextEncoder(ClipArch.tiny("quick_gelu", None, _WIDTH)),
        "text_encoders.clip_g.transformer.": ClipTextEncoder(ClipArch.tiny("gelu", _WIDTH, _WIDTH)),
        "text_encoders.t5xxl.transformer.": T5Encoder(T5Arch.tiny(width=2 * _WIDTH)),
    }  # fmt: skip


def write_small_sd3(folder: Path, seed: int) -> Path:
    """Writes `base.safetensors`, fp16, and T5's `tokenizer.json` beside it; returns the checkpoint's path."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for prefix, network in networks().items():
        network.init(rng, "float16")
        tensors |= {prefix + name: np.ascontiguousarray(t.numpy()) for name, t in network.weights()}
    save_file(folder / "base.safetensors", tensors, {"modelspec.title": "a small SD3.5 with random weights"})
    raw = json.dumps(_vocabulary()).encode()
    write_durably(folder / "tokenizer.json", [raw], len(raw))
    return folder / "base.safetensors"


def _vocabulary() -> dict[str, Any]:
    """Letters and a few words, in the form of `tokenizers`; a word is likelier than its letters."""
    special = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0]]
    letters = [[c, -6.0] for c in ("\u2581", *string.ascii_letters, *string.digits, *string.punctuation)]
    words = [[f"\u2581{word}", -4.0] for word in _WORDS]
    return {"version": "1.0", "model": {"type": "Unigram", "unk_id": 2, "vocab": [*special, *letters, *words]}}
