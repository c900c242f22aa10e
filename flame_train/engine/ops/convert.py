"""The same values in another dtype or another place in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..dtype import Array, DType
from ..op import Sample, primitive, sample
from ..sample import of_one


@primitive(torch=None, moves=True)
def cast(xp: Any, input: Array, dtype: DType) -> Array:
    """input in another dtype (torch's Tensor.to(dtype)); the gradient is cast back"""
    return input.astype(dtype)


@cast.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


@cast.samples
def _() -> Iterator[Sample]:
    yield sample((3, 4), np.dtype(np.float64))


@primitive(torch="clone", moves=True)
def clone(xp: Any, input: Array) -> Array:
    """A copy of input in row-major memory"""
    return xp.array(input, order="C", copy=True)


@clone.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


clone.samples(of_one())
