"""The T5 encoder from a file of its own, its folder, a whole diffusers folder, or a checkpoint that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.engine import nn
from flame_train.engine.dtype import DType
from flame_train.errors import ModelFileError
from flame_train.io.keymap import Shape
from flame_train.io.resolve import Component, Resolved, resolve
from flame_train.io.weights import Weights, open_weights

from .identify import identify
from .keys import t5
from .parts import Native, digest, parts
from .t5 import T5Arch, T5Encoder

_NAME: Final = "T5 text encoder"


def load_t5(
    path: str | Path, *, device: str, dtype: DType | str, check_finite: bool = True, fp8: nn.Fp8 = "off"
) -> T5Encoder:
    """The encoder in `dtype` on `device`, from weights of any float type, fp8 (plain or scaled) included.

    `fp8` is `nn.load`'s; a plain fp8 file loses nothing by "weights".

    Tensors go to the device one by one: 16 GB of host memory suffice for T5-XXL. Raises ModelFileError where there is
    no T5 v1.1 encoder, and for missing, unexpected and mis-shaped tensors, before anything is read.
    """
    with open_weights(path) as weights:
        encoder, source = _part(weights, _resolved(weights))
        what = f"{path}: {_NAME}"
        nn.load(encoder, source, dtype=dtype, device=device, what=what, check_finite=check_finite, fp8=fp8)
    return encoder


def inspect_t5(path: str | Path) -> T5Encoder:
    """The encoder with its weights declared, from headers alone. Raises ModelFileError as `load_t5` does."""
    with open_weights(path) as weights:
        return _part(weights, _resolved(weights))[0]


def t5_digest(path: str | Path) -> str:
    """SHA-256, in hex, over the encoder's tensors: what a cache of its outputs depends on."""
    with open_weights(path) as weights:
        return digest(weights, _resolved(weights)[1].sources.values())


def _resolved(weights: Weights) -> tuple[Component, Resolved]:
    prefix, found = t5.prefix_of(weights.names), identify(weights.shapes, weights.metadata)
    if prefix is None or found.kind == "quantised":
        raise ModelFileError(
            f"{weights.path}: expected a T5 text encoder, alone or in a checkpoint, found {found.detail}; "
            "name a file such as t5xxl_fp16.safetensors, or a diffusers folder"
        )
    component = t5.component(_NAME, (prefix,))
    return component, resolve([component], weights.names)


def _part(weights: Weights, found: tuple[Component, Resolved]) -> tuple[T5Encoder, Native]:
    component, resolved = found
    made: dict[str, Any] = parts(weights, weights.shapes, resolved, [component], _build)
    encoder, source = made[_NAME]
    return encoder, source


def _build(_: str, native: Mapping[str, Shape]) -> T5Encoder:
    return T5Encoder(T5Arch.from_shapes(native))
