"""The same values in another dtype or another place in memory."""

from __future__ import annotations

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, bfloat16
from ...namespace import Namespace
from ...op import primitive, sample
from ...op_samples import of_one
from .conditions import AT_MOST_FP32, floating, no_copies
from .dims import Shape


@primitive(torch=None, data_movement=True)
def cast(xp: Namespace, input: Array, dtype: DType) -> Array:
    """input in another dtype, itself if it has that (torch's Tensor.to(dtype)); the gradient is cast back"""
    return input.astype(dtype, copy=False)


cast.vjp("input")(lambda xp, g: g)


def _castable(input: Array, dtype: DType) -> str:
    return floating(input) or (f"no kernel for {dtype}" if np.dtype(dtype) not in AT_MOST_FP32 else "")


@cast.cuda("generated", when=_castable)
def _(k: Launcher, input: Array, dtype: DType) -> Array:
    return k.cast(input, np.dtype(dtype))


@cast.cuda_vjp("generated", "input", when=_castable)
def _(k: Launcher, g: Array, input_shape: Shape) -> Array:
    return g


cast.samples(sample((3, 4), np.dtype(np.float64)))
cast.perf_samples(sample((4097, 33), bfloat16))


@primitive(torch="clone", data_movement=True)
def clone(xp: Namespace, input: Array) -> Array:
    """A copy of input in row-major memory"""
    return xp.array(input, order="C", copy=True)


clone.vjp("input")(lambda xp, g: g)
clone.cuda("copies", when=no_copies)(lambda k, input: k.copied(input))


clone.samples(*of_one())
