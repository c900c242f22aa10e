"""The idioms that diffusion networks are made of, by name, so that models read like the paper and run fused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array, DType, as_dtype
from ..op import ErrorSample, Sample, primitive, sample
from ..sample import Values
from .elementwise import gelu_slope, gelu_value


@primitive(torch=None)
def geglu(xp: Any, input: Array) -> Array:
    """value * gelu(gate) for input = [value, gate] along the last dim (arXiv 2002.05202), with the exact gelu"""
    value, gate = _halves(input)
    return value * gelu_value(xp, gate)


def _halves(x: Array) -> tuple[Array, Array]:
    if x.shape[-1] % 2:
        raise ShapeError(f"geglu: expected an even last dim holding value and gate, got {tuple(x.shape)}")
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


@geglu.vjp("input")
def _(xp: Any, g: Array, input: Array) -> Array:
    value, gate = _halves(input)
    return xp.concatenate([g * gelu_value(xp, gate), g * value * gelu_slope(xp, gate, "none")], axis=-1)


@geglu.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 8))
    yield sample((5, 2))
    yield sample((0, 4))


@geglu.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3)), ShapeError, "expected an even last dim")


@primitive(torch=None, moves=True)
def timestep_embedding(
    xp: Any, timesteps: Array, dim: int, max_period: float = 10000.0, dtype: DType | str = "float32"
) -> Array:
    """[cos(t * f), sin(t * f)] with f = max_period^(-i / (dim / 2)), for t of shape (B,) (LDM's timestep_embedding)

    Computed in fp32 from fp32 frequencies, as the reference implementations do, and returned as `dtype`.
    """
    half = dim // 2
    steps = xp.arange(half, dtype=np.float32) / np.float32(half)
    freqs = xp.exp(np.float32(-math.log(max_period)) * steps)
    args = timesteps.astype(np.float32)[..., None] * freqs
    return xp.concatenate([xp.cos(args), xp.sin(args)], axis=-1).astype(as_dtype(dtype))


timestep_embedding.nograd("timesteps")


@timestep_embedding.samples
def _() -> Iterator[Sample]:
    yield sample(Values((3,), 0, 999), 8, dtype="float64")


@primitive(torch=None)
def gated_add(xp: Any, input: Array, gate: Array, update: Array) -> Array:
    """input + gate * update: the residual of a modulated transformer block"""
    return input + gate * update


@gated_add.vjp("input")
def _(xp: Any, g: Array) -> Array:
    return g


@gated_add.vjp("gate")
def _(xp: Any, g: Array, update: Array) -> Array:
    return g * update


@gated_add.vjp("update")
def _(xp: Any, g: Array, gate: Array) -> Array:
    return g * gate


@gated_add.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4), (2, 1, 4), (2, 3, 4))
