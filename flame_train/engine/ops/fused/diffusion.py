"""The idioms that diffusion networks are made of, by name, so that models read like the paper and run fused."""

from __future__ import annotations

import math

import numpy as np

from ....errors import ShapeError
from ...dtype import Array, DType, as_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ...op_samples import Values
from ..common.elementwise_codegen import elementwise_kernel
from ..pointwise.activations import gated_kernels, gelu_value, gelu_value_and_derivative, halves


@primitive(torch=None)
def geglu(xp: Namespace, input: Array) -> Array:
    """value * gelu(gate) for input = [value, gate] along the last dim (arXiv 2002.05202), with the exact gelu"""
    value, gate = halves(input, "geglu")
    return value * gelu_value(xp, gate)


@geglu.vjp("input")
def _(xp: Namespace, g: Array, input: Array) -> Array:
    value, gate = halves(input, "geglu")
    gelu, slope = gelu_value_and_derivative(xp, gate)
    return xp.concatenate([g * gelu, g * value * slope], axis=-1)


geglu.samples(sample((2, 3, 8)), sample((5, 2)), sample((0, 4)))
geglu.errors(ErrorSample(sample((2, 3)), ShapeError, "expected an even last dim"))


gated_kernels(geglu, "gelu")
geglu.perf_samples(sample((3, 77, 2560)), sample((5, 16)))


@primitive(torch=None, data_movement=True)
def timestep_embedding(
    xp: Namespace, timesteps: Array, dim: int, max_period: float = 10000.0, dtype: DType | str = "float32"
) -> Array:
    """[cos(t * f), sin(t * f)] with f = max_period^(-i / (dim / 2)), for t of shape (B,) (LDM's timestep_embedding)

    Computed in fp32 from fp32 frequencies, as the reference implementations do, and returned as `dtype`. The
    frequencies are rounded from fp64, so that every device has the same: at t = 999 their last bit shows.

    Args:
        timesteps: (B,).
        dim: the width of the embedding, even.
        max_period: the longest wavelength, in timesteps over 2 pi.

    Returns:
        (B, dim).

    Raises:
        ShapeError: an odd dim.
    """
    if dim % 2:
        raise ShapeError(f"timestep_embedding: expected an even dim, for as many cosines as sines, got {dim}")
    half = dim // 2
    exponents = np.float32(-math.log(max_period)) * xp.arange(half, dtype=np.float32)
    exponents = exponents / np.float32(half)  # in this order: dividing first loses a bit at 320
    freqs = xp.exp(exponents.astype(np.float64)).astype(np.float32)
    args = timesteps.astype(np.float32)[..., None] * freqs
    return xp.concatenate([xp.cos(args), xp.sin(args)], axis=-1).astype(as_dtype(dtype))


timestep_embedding.non_differentiable("timesteps")


timestep_embedding.errors(ErrorSample(sample((3,), 7), ShapeError, "expected an even dim, .* got 7"))
timestep_embedding.samples(sample(Values((3,), 0, 999), 8, dtype="float64"))


@primitive(torch=None)
def gated_add(xp: Namespace, input: Array, gate: Array, update: Array) -> Array:
    """input + gate * update: the residual of a modulated transformer block"""
    return input + gate * update


gated_add.vjp("input")(lambda xp, g: g)
gated_add.vjp("gate")(lambda xp, g, update: g * update)
gated_add.vjp("update")(lambda xp, g, gate: g * gate)


elementwise_kernel(gated_add, "input + gate * update", input="g", gate="g * update", update="g * gate")
gated_add.errors(
    ErrorSample(sample((2, 3), (4,), (2, 3)), ShapeError, "gated_add: the shapes of .* do not broadcast together")
)
gated_add.samples(sample((2, 3, 4), (2, 1, 4), (2, 3, 4)))
gated_add.perf_samples(sample((2, 300, 640), (2, 1, 640), (2, 300, 640)))
