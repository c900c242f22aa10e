"""Writes a checkpoint of full size with random weights, in the published single-file layout, all encoders inside.

    python scripts/random_checkpoint.py FOLDER [--model sdxl] [--without-t5] [--empty] [--device cuda]

`base.safetensors` in fp16: sdxl 7 GB, sd35-medium 16, sd35-large 28, flux-dev 34, of the last three 9.5 for T5, beside
which a small `tokenizer.json` is put. It draws nothing anyone would want, but everything about it besides the values is
as in the real one: names, shapes, dtypes. For trying the whole program at full size where the real file cannot be had.
With `--empty` all weights are 0 and take no room on a disk that knows sparse files: enough for headers and for memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.io.header import build_header
from flame_train.io.safetensors import describe, save_stream
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import FAMILIES
from flame_train.text_encoders.clip.names import clip_from_openclip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.tools.bench import randomise


class _Arrays:
    """A network's weights on the host, as the name tables read them; zeros without memory for one that has none."""

    def __init__(self, module: nn.Module, empty: bool) -> None:
        if empty:
            self.arrays = {name: np.broadcast_to(np.float16(0), shape) for name, shape in module.shapes().items()}
        else:
            self.arrays = {name: np.array(t.numpy(), order="C") for name, t in module.weights()}

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return self.arrays[name]


MODELS = tuple(size for family in FAMILIES.values() for size in family.published if size != family.small)


def parts_of(model: str, t5: bool) -> list[tuple[str, nn.Module]]:
    """The networks of a model with their prefixes."""
    family = next(family for family in FAMILIES.values() if model in family.published)
    prefixes = {component.name: component.prefixes[0] for component in family.files.components}
    left_out = "" if t5 else family.encoders.get("t5", "")
    return [(prefixes[name], network) for name, network in family.published[model]().items() if name != left_out]


def module_of_openclip(prefix: str, module: nn.Module) -> bool:
    """Whether the published file has the network's names in OpenCLIP: SDXL's bigG and SD 2's ViT-H."""
    vit_h = isinstance(module, ClipTextEncoder) and module.arch == ClipArch.vit_h()
    return "embedders.1.model." in prefix or vit_h


def tensors(parts: Sequence[tuple[str, nn.Module]], device: str) -> Mapping[str, np.ndarray[Any, Any]]:
    """Every tensor of the checkpoint by its published name; zeros without memory for no `device`."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for prefix, module in parts:
        if device:
            randomise(module, as_dtype("fp16"), get_backend(device))
        weights = _Arrays(module, not device)
        module.unload()
        if module_of_openclip(prefix, module):
            prefix = prefix.replace("cond_stage_model.transformer.", "cond_stage_model.model.")
            sources = clip_from_openclip().inverse.pull(weights.arrays).sources
            found |= {prefix + name: source.read(weights) for name, source in sources.items()}
        else:
            found |= {prefix + name: a for name, a in weights.arrays.items()}
    return found


def write_empty(output: Path, made: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """A file with these tensors' header, and zeros that were never written."""
    header, placed = build_header([describe(n, a) for n, a in made.items()], {})
    with open(output, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(info.nbytes for info in placed))


def write_words(folder: Path, made: Iterable[str]) -> None:
    """A small vocabulary beside a checkpoint of these tensors, but for encoders whose own comes along."""
    starts = {name.partition(".transformer.")[0] for name in made if name.startswith("text_encoders.")}
    if not any(start.startswith(("text_encoders.qwen3", "text_encoders.mistral")) for start in starts):
        write_vocabulary(folder, umt5="text_encoders.umt5xxl" in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="sdxl", choices=MODELS)
    parser.add_argument("--without-t5", action="store_true")
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    output = args.folder / "base.safetensors"
    made = tensors(parts_of(args.model, not args.without_t5), "" if args.empty else args.device)
    if args.empty:
        write_empty(output, made)
    else:
        save_stream(output, [describe(n, a) for n, a in made.items()], made.__getitem__, {})
    write_words(args.folder, made)
    print(f"{output}: {len(made)} tensors, {sum(a.nbytes for a in made.values()) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
