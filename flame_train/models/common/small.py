"""What `quickstart` teaches, and small base models as files: random weights, and the trained small SDXL.

Random ones generate noise; a LoRA on them only learns a better guess of the velocity.

This engine trained the small SDXL from scratch, on the images of `quickstart.drawings`. It has SDXL's structure with
7 million weights: two text encoders over CLIP's vocabulary, autoencoder and UNet. It generates the scene of a caption
of that world. How it was made: `docs/log/small-sdxl.md`, by `scripts/small_sdxl`.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.config.schema import LossSection
from flame_train.disk.atomic_write import write_atomically
from flame_train.engine import nn
from flame_train.io.safetensors import save_file
from flame_train.text_encoders.mistral import tokenizer as tekken
from flame_train.text_encoders.mistral.network import Mistral
from flame_train.text_encoders.qwen3.network import Qwen3
from flame_train.text_encoders.qwen3.tokenizer import bytes_alone


@dataclass(frozen=True, slots=True)
class QuickstartSpec:
    """How a small base is taught: by which data, and by which settings.

    Attributes:
        base: what the base model is, in a few words.
        note: what the result shows, and what not.
        repeats: how often the new images come in an epoch.
        known: how many images of what the base knows are shown beside them, so that it keeps that.
        prompts: drawn before and after training, with what is taught; a base whose images are noise has none.
        known_prompts: likewise, of what the base knew before.
        seed: of the noise of the first prompt.
        ema_decay: of the moving average that is the result; 0: none.
    """

    base: str
    note: str = "a smoke run: the base model is small and random, so nothing is drawn; this shows that training works"
    repeats: int = 1
    known: int = 0
    prompts: tuple[str, ...] = ()
    known_prompts: tuple[str, ...] = ()
    seed: int = 42
    ema_decay: float = 0.0
    resolution: int = 64
    bucket_step: int = 16
    batch_size: int = 5
    steps: int = 80
    lr: float = 1e-3  # far above the usual one, for so few steps
    targets: tuple[str, ...] = ("attention",)
    loss: LossSection = field(default_factory=LossSection)


SMALL_SDXL: Final = Path(__file__).with_name("assets") / "small_sdxl.safetensors"
"""The trained small SDXL, fp16."""
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


def write_small(networks: Mapping[str, nn.Module], folder: Path, seed: int) -> Path:
    """Writes `base.safetensors`, fp16, and a `tokenizer.json` into one folder; returns the checkpoint's path."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for prefix, network in networks.items():
        network.init(rng, "float16")
        tensors |= {prefix + name: np.ascontiguousarray(t.numpy()) for name, t in network.weights()}
    save_file(folder / "base.safetensors", tensors, {"modelspec.title": "a small model with random weights"})
    kinds = {type(network) for network in networks.values()}
    write_vocabulary(folder, Qwen3 in kinds, Mistral in kinds)
    return folder / "base.safetensors"


def write_vocabulary(folder: Path, qwen: bool = False, mistral: bool = False, umt5: bool = False) -> None:
    """Writes a `tokenizer.json`: of T5's kind with letters and a few words, or of another's with bytes alone."""
    bytes_of = tekken.bytes_alone if mistral else bytes_alone
    raw = bytes_of().encode() if qwen or mistral else json.dumps(_vocabulary(umt5)).encode()
    write_atomically(folder / "tokenizer.json", [raw], len(raw))


def _vocabulary(umt5: bool) -> dict[str, Any]:
    """Letters and a few words, in the form of `tokenizers`; a word is likelier than its letters."""
    special = [[piece, 0.0] for piece in ("<pad>", "</s>", *(["<s>"] if umt5 else []), "<unk>")]
    letters = [[c, -6.0] for c in ("\u2581", *string.ascii_letters, *string.digits, *string.punctuation)]
    words = [[f"\u2581{word}", -4.0] for word in _WORDS]
    return {
        "version": "1.0",
        "model": {"type": "Unigram", "unk_id": len(special) - 1, "vocab": [*special, *letters, *words]},
    }


def copy_small_sdxl(path: Path) -> None:
    """Copies the trained small SDXL to `path`, whole or not at all. Raises OutputError."""
    raw = SMALL_SDXL.read_bytes()
    write_atomically(path, [raw], len(raw))
