"""Finds which of a file's weights a known program packed in fewer bits: the list of formats that are read."""

from __future__ import annotations

from typing import Final

from flame_train.io import bitsandbytes, comfy_quant
from flame_train.io.packed import Unpacked
from flame_train.io.weight_files import Weights

_FORMATS: Final = (bitsandbytes.packed, comfy_quant.packed)


def unpacked(weights: Weights) -> Weights:
    """`weights`, read unpacked where a format of the list is found in them. Raises ModelFileError for a broken one."""
    found = {name: packed for read in _FORMATS for name, packed in read(weights).items()}
    return Unpacked(weights, found) if found else weights
