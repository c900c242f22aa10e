"""Weights as programs pack them: bitsandbytes in folders of diffusers, and ComfyUI.

bitsandbytes has NF4 and FP4, and 8 bits with a scale a row. In 4 bits, two to a byte, the first in the upper half, each
is an index into a map of 16 numbers, times the largest magnitude of its block. With double quantisation (QLoRA, arXiv
2305.14314, section 3) these magnitudes are bytes: indices into a map of 256 numbers, times their own blocks'
magnitudes, plus an offset.

ComfyUI has 8 bits with a scale for the tensor, each row, or each block. A JSON text says each layer's format, as a
tensor `layer.comfy_quant` or in the file's `_quantization_metadata`. `convrot` marks a weight whose columns, by groups,
were turned by a Hadamard matrix before it was rounded. That matrix is its own inverse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from flame_train.io.convrot import hadamard, is_group
from flame_train.io.dtypes import FLOAT_TAGS, Array, tag_of, widened
from flame_train.io.header import MAX_RANK
from flame_train.io.json_values import json_tree, number, table, text, whole
from flame_train.io.packed import Packed, Shape, refuse, said_in
from flame_train.io.weight_files import StoredInt8, StoredNf4, Weights

_GROUP: Final = 256  # columns that are turned together, where nothing is said
MARK: Final = ".comfy_quant"
INT8: Final = "int8_tensorwise"
DENOISER_PREFIXES: Final = ("model.diffusion_model.", "net.", "")
"""What may stand before a denoiser's names in files that ComfyUI reads (`unet_prefix_from_state_dict`)."""
_WHOLES: Final[Mapping[str, Any]] = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    INT8: np.int8,
    "int8_blockwise": np.int8,
}
"""The formats that are read, and what each stores a weight as."""


def marked(group: int) -> bytes:
    """Returns what ComfyUI says of a layer in int8 by rows, whose columns are rotated by such groups; 0: not."""
    return json.dumps({"format": INT8} | ({"convrot": True, "convrot_groupsize": group} if group else {})).encode()


def by_comfyui(weights: Weights) -> dict[str, Packed]:
    """Returns the tensors among `weights` that ComfyUI packed in a format that is read here. Raises ModelFileError."""
    names = frozenset(weights.names)
    tensors = {}
    for layer, settings in layers_said(weights):
        name, scale = f"{layer}.weight", f"{layer}.weight_scale"
        dtype = _WHOLES.get(settings.get("format", ""))
        if dtype is None or name not in names:
            continue  # what is left in the file names its format to whoever identifies it
        if scale not in names:
            raise refuse(weights.path, name, f"packed as {settings['format']}, without its {scale}")
        stored, shape, scales = weights.info(name).dtype, weights.info(name).shape, weights.info(scale).shape
        if stored not in (tag_of(dtype), "U8"):
            raise refuse(weights.path, name, f"expected {tag_of(dtype)} for {settings['format']}, got {stored}")
        if weights.info(scale).dtype not in FLOAT_TAGS:
            raise refuse(weights.path, scale, f"expected floats, got {weights.info(scale).dtype}")
        group = int(settings.get("convrot_groupsize", _GROUP)) if settings.get("convrot") else 0
        if group and (len(shape) != 2 or not is_group(group, shape[1])):
            raise refuse(weights.path, name, f"turned by groups of {group} columns, which do not divide {shape}")
        if not _fit(shape, scales, blocks=settings["format"] != INT8):
            raise refuse(weights.path, name, f"scales of shape {scales} do not fit a weight of shape {shape}")
        beside = tuple(n for n in (layer + MARK, f"{layer}.input_scale") if n in names)
        by_rows = dtype is np.int8 and len(shape) == 2 and math.prod(scales) in (1, shape[0])
        factors = partial(checked_scales, weights.path, scale)
        kept = partial(_int8, factors, group) if by_rows else None
        read = partial(_read, factors, dtype, group)
        tensors[name] = Packed((name, scale), settings["format"].upper(), shape, read, beside, kept)
    return tensors


def layers_said(weights: Weights) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each packed layer and what the file says of it."""
    for name in weights.names:
        if name.endswith(MARK):
            yield name.removesuffix(MARK), _checked(weights, name, json_tree(said_in(weights, name)))
    text = weights.metadata.get("_quantization_metadata")
    if text is not None:
        tree = json_tree(text)
        if not isinstance(tree, dict):
            raise refuse(weights.path, "_quantization_metadata", "expected a JSON text with a table")
        for layer, settings in table(tree.get("layers")).items():
            if isinstance(settings, dict):
                yield layer, _checked(weights, layer, settings)


def _checked(weights: Weights, name: str, settings: Any) -> Mapping[str, Any]:
    """Checks what is said of a layer. Raises ModelFileError unless it is a table with a format and a group."""
    group = table(settings).get("convrot_groupsize", _GROUP)
    if not isinstance(settings, dict) or not isinstance(settings.get("format", ""), str) or not whole(group):
        raise refuse(weights.path, name, "expected a JSON text that says a weight's format")
    return settings


def _fit(shape: tuple[int, ...], scales: tuple[int, ...], blocks: bool) -> bool:
    """Tells whether there is a scale for all, for each row, or with `blocks` for each block of rows and columns."""
    if math.prod(scales) == 1 or (shape and math.prod(scales) == scales[0] == shape[0]):
        return True
    whole_blocks = len(shape) == len(scales) and all(s and n % s == 0 for n, s in zip(shape, scales, strict=True))
    return blocks and len(shape) == 2 and whole_blocks


def checked_scales(path: Path, name: str, stored: Array) -> Array:
    """Returns scales in fp32. Raises ModelFileError for NaN, infinity and negative ones."""
    scales = widened(stored, np.float32)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise refuse(path, name, "holds NaN, infinity or negative numbers, and is to hold scales")
    return scales


def _int8(factors: Callable[[Array], Array], group: int, parts: Sequence[Array]) -> StoredInt8:
    data, scale = parts
    return StoredInt8(data.view(np.int8), np.broadcast_to(factors(scale).reshape(-1), len(data)), group)


def _read(factors: Callable[[Array], Array], dtype: Any, group: int, parts: Sequence[Array]) -> Array:
    """Returns the weight in fp32. Files may keep fp8 as bytes."""
    stored, scale = parts
    weight = widened(stored.view(dtype), np.float32)
    scale = factors(scale)
    if scale.size == 1:
        weight *= scale.reshape(())
    elif scale.size == len(scale) == len(weight):
        weight *= scale.reshape(-1, *(1,) * (weight.ndim - 1))
    else:
        rows, columns = (n // s for n, s in zip(weight.shape, scale.shape, strict=True))
        weight *= np.repeat(np.repeat(scale, rows, 0), columns, 1)
    if group:
        weight = (weight.reshape(len(weight), -1, group) @ hadamard(group)).reshape(weight.shape)
    return weight


_STATE: Final = ".quant_state.bitsandbytes__"
_KINDS: Final = ("nf4", "fp4")
_FLOATS: Final = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_ROWS: Final = 0  # of bitsandbytes' formats of 8 bits; others are orders of a GPU's tiles
_ROW_SCALE: Final = np.float32(1 / 127)


def by_bitsandbytes(weights: Weights) -> dict[str, Packed]:
    """Returns the tensors among `weights` that bitsandbytes packed. Raises ModelFileError if one lacks a part."""
    names = frozenset(weights.names)
    tensors = {}
    for name in weights.names:
        if _STATE in name:
            tensor, _, kind = name.partition(_STATE)
            if kind not in _KINDS:
                raise refuse(weights.path, tensor, f"{name}: expected a name that ends in {' or '.join(_KINDS)}")
            tensors[tensor] = _four_bits(weights, names, tensor, kind, name)
        elif name.endswith(".SCB") and (tensor := f"{name.removesuffix('.SCB')}.weight") in names:
            tensors[tensor] = _eight_bits(weights, names, tensor, name)
    return tensors


def _four_bits(weights: Weights, names: frozenset[str], tensor: str, kind: str, state_name: str) -> Packed:
    state = _state(weights, tensor, state_name)
    nested = "nested_blocksize" in state
    ends = (".absmax", ".quant_map", *((".nested_absmax", ".nested_quant_map") if nested else ()))
    parts = (tensor, *(tensor + end for end in ends))
    missing = [part for part in parts if part not in names]
    if missing:
        raise refuse(weights.path, tensor, f"packed in 4 bits, without its {missing[0]}")
    tags = [weights.info(part).dtype for part in parts]
    if tags[0] != "U8" or (nested and tags[1] != "U8") or not set(tags[1 + nested :]) <= FLOAT_TAGS:
        raise refuse(weights.path, tensor, f"packed in 4 bits; expected bytes, and floats for them, got {tags}")
    shape = tuple(state["shape"])
    count, blocks = math.prod(shape), -(-math.prod(shape) // state["blocksize"])
    sizes = [math.prod(weights.info(part).shape) for part in parts]
    counts = [-(-count // 2), blocks, 16]
    counts += [-(-blocks // state["nested_blocksize"]), 256] if nested else []
    if sizes != counts:
        raise refuse(weights.path, tensor, f"packed in 4 bits; expected parts of {counts} numbers, got {sizes}")
    state["blocksize"] = min(state["blocksize"], max(count, 1))  # the last block may be cut short: no more is laid out
    if nested:
        state["nested_blocksize"] = min(state["nested_blocksize"], max(blocks, 1))
    as_it_is = partial(_nf4, state) if nested and kind == "nf4" else None
    return Packed(parts, kind.upper(), shape, partial(_from_four_bits, state, shape), (state_name,), as_it_is)


def _nf4(state: dict[str, Any], parts: Sequence[Array]) -> StoredNf4:
    data, magnitudes, codes, outer, outer_codes = (part.reshape(-1) for part in parts)
    blocks = state["blocksize"], state["nested_blocksize"], float(state["nested_offset"])
    return StoredNf4(data, magnitudes, codes, outer, outer_codes, *blocks)


def _state(weights: Weights, tensor: str, name: str) -> dict[str, Any]:
    """Returns what bitsandbytes says of a tensor, checked."""
    try:
        state = table(json_tree(said_in(weights, name)))
        nested = "nested_blocksize" in state
        sizes = [state["blocksize"], *state["shape"], *([state["nested_blocksize"]] if nested else [])]
        if not all(type(size) is int and 0 < size < 1 << 31 for size in sizes) or len(state["shape"]) > MAX_RANK:
            raise ValueError
        if text(state["dtype"]) not in _FLOATS or (nested and number(state.get("nested_offset")) is None):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise refuse(weights.path, tensor, f"{name} is no description that bitsandbytes writes") from None
    return dict(state)


def _from_four_bits(state: dict[str, Any], shape: Shape, parts: Sequence[Array]) -> Array:
    """Returns the tensor, in the dtype that it had before it was packed."""
    data, magnitudes, codes, *nested = parts
    count = math.prod(shape)
    magnitudes = magnitudes.reshape(-1)
    if nested:
        outer = np.repeat(nested[0].reshape(-1), state["nested_blocksize"])[: magnitudes.size]
        magnitudes = nested[1][magnitudes] * outer + np.float32(state["nested_offset"])
    both = codes[np.stack([data.reshape(-1) >> 4, data.reshape(-1) & 15], 1)].reshape(-1)[:count]
    blocks = np.zeros((magnitudes.size, state["blocksize"]), np.float32)
    blocks.reshape(-1)[:count] = both
    blocks *= magnitudes[:, None]
    tensor: Array = blocks.reshape(-1)[:count].reshape(shape).astype(_FLOATS[state["dtype"]])
    return tensor


def _eight_bits(weights: Weights, names: frozenset[str], tensor: str, scales: str) -> Packed:
    info, rows = weights.info(tensor), weights.info(scales).shape
    if info.dtype != "I8" or len(info.shape) != 2 or rows != info.shape[:1]:
        raise refuse(weights.path, tensor, f"8 bits with {rows} scales do not make a {info.dtype} weight {info.shape}")
    beside = tuple(n for n in (f"{tensor}_format", f"{tensor.removesuffix('weight')}weight_format") if n in names)
    for name in beside:
        if weights.info(name).nbytes and (stored := int(weights.read(name).reshape(-1)[0])) != _ROWS:
            raise refuse(weights.path, tensor, f"its 8 bits lie as a GPU's format {stored} has them, not row by row")
    return Packed((tensor, scales), "INT8", info.shape, _from_eight_bits, tuple(dict.fromkeys(beside)))


def _from_eight_bits(parts: Sequence[Array]) -> Array:
    tensor: Array = parts[0] * parts[1].astype(np.float32)[:, None] * _ROW_SCALE
    return tensor
