"""One way to read weights, whether they are a single file, shards, or the folders of a diffusers pipeline."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.errors import ModelFileError
from flame_train.io.digests import Digests
from flame_train.io.foreign_files import HOW_TO_CONVERT, PICKLE_SUFFIXES
from flame_train.io.gguf import GgufFile, is_gguf
from flame_train.io.packed import Unpacked
from flame_train.io.packed_formats import by_bitsandbytes, by_comfyui
from flame_train.io.safetensors import SafetensorsFile
from flame_train.io.weight_files import ShardedWeights, Weights

COMPONENTS: Final = (
    *("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "text_conditioner"),
)

_STEMS: Final = ("diffusion_pytorch_model", "model")
_LORAS: Final = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")  # as PEFT and diffusers call them
VARIANTS: Final = ("fp32", "bf16", "fp16")  # in order of preference after the one without a variant
_INDEX: Final = re.compile(r".*\.safetensors\.index(\.\w+)?\.json")
_SHARD: Final = re.compile(r".*-\d{5}-of-(\d{5})(\.\w+)?\.safetensors")
_MAX_INDEX_BYTES: Final = 20_000_000
_PIECE: Final = 4096  # bytes of a tensor at its begin, in its middle and at its end that `sampled_digest` reads


def sampled_digest(path: str | Path, digests: Digests | None = None) -> str:
    """Returns SHA-256, in hex, over every tensor's name, dtype, shape and a few of its bytes: cheap for files of any
    size.

    It reads 4 KiB at the beginning, in the middle and at the end of a tensor, and small tensors whole. Training,
    merging or rounding changes all of a tensor, so this distinguishes models. It misses a value changed by hand
    elsewhere, and metadata. Files whose digest `digests` knows are not read.
    """
    with open_weights(path) as weights:
        return (digests or Digests(None)).of(weights.files, "sampled tensors", lambda: _sampled(weights))


def _sampled(weights: Weights) -> str:
    summed = hashlib.sha256()
    for name in sorted(weights.names):
        info = weights.info(name)
        summed.update(f"{name} {info.dtype} {info.shape}".encode("utf-8", "surrogateescape"))
        if info.nbytes:
            for array in weights.stored(name):
                raw = array.reshape(-1).view(np.uint8)
                middle = (raw.size - _PIECE) // 2
                whole = raw.size <= 3 * _PIECE
                pieces = (raw,) if whole else (raw[:_PIECE], raw[middle : middle + _PIECE], raw[-_PIECE:])
                for piece in pieces:
                    summed.update(piece.data)
    return summed.hexdigest()


def open_weights(path: str | Path, as_stored: bool = False) -> Weights:
    """Open a safetensors or GGUF file, an index of shards, a component folder, or a whole diffusers folder.

    A component folder may hold one file, or shards with an index. It prefers full precision, and takes a variant
    (`.fp16.`) if there is no other. In a whole diffusers folder each tensor's name begins with its component's, as in
    `unet/conv_in.weight`. Weights that a known program packed in fewer bits are read unpacked, unless `as_stored`.
    Raises ModelFileError.
    """
    path = Path(path)
    try:
        components = [name for name in COMPONENTS if (path / name).is_dir()] if path.is_dir() else []
        if components:
            weights = _open_pipeline(path, components)
        else:
            weights = _open_component(path) if path.is_dir() else _open_file(path)
        return weights if as_stored else unpacked(weights)
    except OSError as error:
        raise ModelFileError(cannot_be_read(path, error)) from error


def cannot_be_read(path: Path, error: OSError) -> str:
    """Returns the message for a model file or folder that is out of reach."""
    return f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions"


def _open_file(path: Path) -> Weights:
    if path.is_file() and _INDEX.fullmatch(path.name):
        return _open_shards(path)
    shard = _SHARD.fullmatch(path.name)
    if path.is_file() and shard and int(shard[1]) > 1:
        raise ModelFileError(
            f"{path}: is one of the {int(shard[1])} shards of a model; name their folder, or its index "
            "(.safetensors.index.json)"
        )
    return GgufFile(path) if is_gguf(path) else SafetensorsFile(path)


def _open_pipeline(folder: Path, components: Sequence[str]) -> Weights:
    with contextlib.ExitStack() as opened:
        parts = {name: opened.enter_context(_open_component(folder / name)) for name in components}
        home = {f"{part}/{name}": (weights, name) for part, weights in parts.items() for name in weights.names}
        opened.pop_all()
    return ShardedWeights(folder, tuple(parts.values()), home)


def _open_component(folder: Path) -> Weights:
    for candidate in _candidates():
        path = folder / candidate
        if path.is_file():
            return _open_shards(path) if candidate.endswith(".json") else SafetensorsFile(path)
    if (single := _single_file(folder, ".safetensors", "safetensors")) is not None:
        return SafetensorsFile(single)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        raise ModelFileError(f"{folder}: holds no safetensors, only {pickles[0]}, a pickle. {HOW_TO_CONVERT}")
    if (single := _single_file(folder, ".gguf", "GGUF")) is not None:
        return GgufFile(single)
    raise ModelFileError(f"{folder}: holds no safetensors file; expected one, or a diffusers model folder")


def _single_file(folder: Path, suffix: str, kind: str) -> Path | None:
    """Finds the folder's file of this suffix, or None. Raises ModelFileError for several."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == suffix)
    if len(files) > 1:
        names = ", ".join(path.name for path in files[:5])
        raise ModelFileError(f"{folder}: holds {len(files)} {kind} files ({names}); name the one to use")
    return files[0] if files else None


def _candidates() -> list[str]:
    """Lists the file names under which a component's weights are known, best first."""
    names = []
    for stem in _STEMS:
        names += [f"{stem}.safetensors", f"{stem}.safetensors.index.json"]
    for variant in VARIANTS:
        for stem in _STEMS:
            names += [
                f"{stem}.{variant}.safetensors",
                f"{stem}.safetensors.index.{variant}.json",
                f"{stem}.{variant}.safetensors.index.json",
            ]
    return [*names, *_LORAS]


def _open_shards(index: Path) -> Weights:
    file_of = _read_index(index)
    with contextlib.ExitStack() as opened:
        parts = {
            file: opened.enter_context(SafetensorsFile(index.parent / file)) for file in sorted(set(file_of.values()))
        }
        held = {file: frozenset(part.names) for file, part in parts.items()}
        lost = [name for name, file in file_of.items() if name not in held[file]]
        if lost:
            raise ModelFileError(
                f"{index}: lists {len(lost)} tensors that its files do not hold, {lost[0]!r} in "
                f"{file_of[lost[0]]} for one; download the folder again"
            )
        opened.pop_all()
    home = {name: (parts[file], name) for name, file in file_of.items()}
    return ShardedWeights(index.parent, tuple(parts.values()), home)


def _read_index(index: Path) -> dict[str, str]:
    """Reads tensor name -> file name, both checked. A file name that leaves the folder is refused."""
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ModelFileError(f"{index}: is over {_MAX_INDEX_BYTES} bytes, too large for an index of shards")
        content: Any = json.loads(index.read_bytes())
        file_of = content["weight_map"]
        pairs = list(file_of.items())
    except OSError as error:
        raise ModelFileError(f"{index}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise ModelFileError(
            f"{index}: expected JSON with a weight_map of tensor names to files; download the folder again"
        ) from None
    for name, file in pairs:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelFileError(f"{index}: {name!r} is said to be in {file!r}, not a safetensors file beside it")
    return dict(pairs)


_FORMATS: Final = (by_bitsandbytes, by_comfyui)


def unpacked(weights: Weights) -> Weights:
    """Unpacks `weights` where a format of the list is found in them. Raises ModelFileError for a broken one."""
    tensors = {name: packed for read in _FORMATS for name, packed in read(weights).items()}
    return Unpacked(weights, tensors) if tensors else weights
