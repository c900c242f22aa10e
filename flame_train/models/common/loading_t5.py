"""Loads the T5 encoder from its file, its folder, a whole diffusers folder, or a checkpoint that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from flame_train.errors import ModelFileError
from flame_train.io.keymap import Shape
from flame_train.io.resolve import Component, Resolved, resolve
from flame_train.io.together import Weights
from flame_train.io.weights import open_weights
from flame_train.models.common import keys_t5 as t5
from flame_train.models.common.identify import identify
from flame_train.models.common.part import Part, part_of
from flame_train.models.common.parts import parts
from flame_train.models.common.t5 import T5Arch, T5Encoder

_NAME: Final = "T5 text encoder"


def t5_part(path: str | Path, component: str = "T5 text encoder") -> Part:
    """The encoder in a file or folder, with its weights declared: only headers are read.

    Its `load` takes weights of any float type, fp8 (plain or scaled) included. Tensors go to the device one by one, so
    16 GB of host memory suffice for T5-XXL. A plain fp8 file keeps its exact values with `fp8="weights"`.

    Raises:
        ModelFileError: there is no T5 v1.1 encoder, or tensors are missing, unexpected or mis-shaped.
    """
    with open_weights(path) as weights:
        found, resolved = _resolved(weights)
        built = parts(weights, weights.shapes, resolved, [found], _build)[_NAME]
        return part_of(weights, component, built, partial(_build, component, built[1].shapes))


def _resolved(weights: Weights) -> tuple[Component, Resolved]:
    prefix, found = t5.prefix_of(weights.names), identify(weights.shapes, weights.metadata)
    if prefix is None or found.kind == "quantised":
        raise ModelFileError(
            f"{weights.path}: expected a T5 text encoder, alone or in a checkpoint, found {found.detail}; "
            "name a file such as t5xxl_fp16.safetensors, or a diffusers folder"
        )
    component = t5.component(_NAME, (prefix,))
    return component, resolve([component], weights.names)


def _build(_: str, native: Mapping[str, Shape]) -> T5Encoder:
    return T5Encoder(T5Arch.from_shapes(native))
