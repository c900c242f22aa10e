"""Weights as ComfyUI packs them: 8 bits with a scale for the tensor, for each row, or for each block.

A JSON text says each layer's format, as a tensor `layer.comfy_quant` or in the file's `_quantization_metadata`.
`convrot` marks a weight whose columns, by groups, were turned by a Hadamard matrix before it was rounded. That matrix
is its own inverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from flame_train.io.dtypes import Array
from flame_train.io.json_values import json_tree, table, whole
from flame_train.io.packed import Packed, refuse, said_in
from flame_train.io.weight_files import Weights

_GROUP: Final = 256  # columns that are turned together, where nothing is said
MARK: Final = ".comfy_quant"
_DTYPES: Final[Mapping[str, Any]] = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8_tensorwise": np.int8,
    "int8_blockwise": np.int8,
}
"""The formats that are read, and what each stores a weight as."""
_FACTOR_OF_4: Final = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32) / 2


def packed(weights: Weights) -> dict[str, Packed]:
    """Returns the tensors among `weights` that ComfyUI packed in a format that is read here. Raises ModelFileError."""
    names = frozenset(weights.names)
    tensors = {}
    for layer, settings in _layers(weights):
        name, scale = f"{layer}.weight", f"{layer}.weight_scale"
        dtype = _DTYPES.get(settings.get("format", ""))
        if dtype is None or name not in names:
            continue  # what is left in the file names its format to whoever identifies it
        if scale not in names:
            raise refuse(weights.path, name, f"packed as {settings['format']}, without its {scale}")
        shape, scales = weights.info(name).shape, weights.info(scale).shape
        if np.dtype(dtype).itemsize != 1 or weights.info(name).nbytes != math.prod(shape):
            raise refuse(
                weights.path, name, f"expected 8 bits for {settings['format']}, got {weights.info(name).dtype}"
            )
        group = int(settings.get("convrot_groupsize", _GROUP)) if settings.get("convrot") else 0
        if group and (
            len(shape) != 2 or group > shape[1] or shape[1] % group or 4 ** round(math.log(group, 4)) != group
        ):
            raise refuse(weights.path, name, f"turned by groups of {group} columns, which do not divide {shape}")
        if not _fit(shape, scales):
            raise refuse(weights.path, name, f"scales of shape {scales} do not fit a weight of shape {shape}")
        beside = tuple(n for n in (layer + MARK, f"{layer}.input_scale") if n in names)
        tensors[name] = Packed((name, scale), settings["format"].upper(), shape, partial(_read, dtype, group), beside)
    return tensors


def _layers(weights: Weights) -> Iterator[tuple[str, Mapping[str, Any]]]:
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


def _fit(shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Tells whether there is a scale for all, for each row, or for each block of rows and columns."""
    if math.prod(scales) == 1 or (shape and math.prod(scales) == scales[0] == shape[0]):
        return True
    return len(shape) == len(scales) == 2 and all(s and n % s == 0 for n, s in zip(shape, scales, strict=True))


def _read(dtype: Any, group: int, parts: Sequence[Array]) -> Array:
    """Returns the weight in fp32. Files may keep fp8 as bytes."""
    stored, scale = parts
    weight: Array = stored.view(dtype).astype(np.float32)
    scale = scale.astype(np.float32)
    if scale.size == 1:
        weight *= scale.reshape(())
    elif scale.size == len(scale) == len(weight):
        weight *= scale.reshape(-1, *(1,) * (weight.ndim - 1))
    else:
        rows, columns = (n // s for n, s in zip(weight.shape, scale.shape, strict=True))
        weight *= np.repeat(np.repeat(scale, rows, 0), columns, 1)
    if group:
        weight = (weight.reshape(len(weight), -1, group) @ _hadamard(group)).reshape(weight.shape)
    return weight


@cache
def _hadamard(size: int) -> Array:
    """Returns the regular Hadamard matrix of ConvRot, orthonormal and symmetric: Kronecker powers of one of 4 rows."""
    return np.ones((1, 1), np.float32) if size == 1 else np.kron(_FACTOR_OF_4, _hadamard(size // 4))
