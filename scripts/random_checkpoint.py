"""Writes an SDXL checkpoint of full size with random weights, in the published single-file layout.

    python scripts/random_checkpoint.py sd_xl_random.safetensors [--device cuda]

7 GB in fp16. It draws nothing anyone would want, but everything about it besides the values is as in the real one:
names, shapes, dtypes. For trying the whole program at full size where the real file cannot be had.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.io.safetensors import describe, save_stream
from flame_train.models.clip import ClipArch, ClipTextEncoder
from flame_train.models.keys.sdxl_text import clip_from_openclip
from flame_train.models.unet_sdxl import UNet, UNetArch
from flame_train.models.vae import Vae, VaeArch
from flame_train.tools.bench import randomise


class _Arrays:
    """A network's weights on the host, as the name tables read them."""

    def __init__(self, module: nn.Module) -> None:
        self.arrays = {name: np.array(t.numpy(), order="C") for name, t in module.weights()}

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self.arrays[name]


def tensors(device: str) -> Mapping[str, np.ndarray[Any, Any]]:
    """Every tensor of the checkpoint by its published name."""
    backend, half = get_backend(device), as_dtype("fp16")
    parts: list[tuple[str, nn.Module]] = [
        ("model.diffusion_model.", UNet(UNetArch.sdxl())),
        ("first_stage_model.", Vae(VaeArch.sdxl())),
        ("conditioner.embedders.0.transformer.", ClipTextEncoder(ClipArch.clip_l())),
        ("conditioner.embedders.1.model.", ClipTextEncoder(ClipArch.bigg())),
    ]
    found: dict[str, np.ndarray[Any, Any]] = {}
    for prefix, module in parts:
        randomise(module, half, backend)
        weights = _Arrays(module)
        module.unload()
        if prefix.endswith("model.") and "embedders.1" in prefix:
            sources = clip_from_openclip().inverse.pull(weights.arrays).sources
            found |= {prefix + name: source.read(weights) for name, source in sources.items()}
        else:
            found |= {prefix + name: a for name, a in weights.arrays.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    made = tensors(args.device)
    save_stream(args.output, [describe(n, a) for n, a in made.items()], made.__getitem__, {})
    print(f"{args.output}: {len(made)} tensors, {sum(a.nbytes for a in made.values()) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
