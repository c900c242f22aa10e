"""The idioms of diffusion networks as ops of their own, so that models read like the paper and one kernel runs them."""

from __future__ import annotations

import math

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import ALLOCATE, GradTargets
from ...backend.cuda.codegen.kernel_ir import Extent, Operands, Program, Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, as_dtype, float32
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...op_samples import Values
from ...tensors.tensor import Tensor
from ..common.conditions import floating
from ..common.dims import Shape, size_along
from ..common.elementwise_codegen import broadcast_grad, elementwise_kernel
from ..common.row_kernels import (
    row_program,
    row_program_with_sums,
    rows_at,
    rows_of,
    shared,
    table,
    target_rows,
    why_not_rows,
)
from ..norm.layer_norm import SUMS, Moments, gradient_program, layer_norm, normalized_rows
from ..pointwise.activations import gated_kernels, gelu, gelu_value, gelu_value_and_derivative, halves
from ..shape.concat import cat


@composite()
def cat_gelu(input: Tensor, hidden: Tensor, *, approximate: str = "none") -> Tensor:
    """[input, gelu(hidden)] along the last dim: attention and MLP side by side (arXiv 2302.05442)"""
    return cat([input, gelu(hidden, approximate=approximate)], -1)


cat_gelu.samples(sample((2, 3, 4), (2, 3, 8)), sample((3, 5), (3, 2), approximate="tanh"))
cat_gelu.perf_samples(sample((1, 77, 640), (1, 77, 2560), approximate="tanh"))
cat_gelu.errors(
    ErrorSample(sample((2, 3), (4, 3)), ShapeError, "equal but for dim -1"),
    ErrorSample(sample((2, 3), (2, 3), approximate="fast"), ValueError, "'none' or 'tanh', got 'fast'"),
)


_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _side_by_side(input: Array, hidden: Array, approximate: str) -> str:
    if approximate not in _GELU or input.dtype != hidden.dtype or input.shape[:-1] != hidden.shape[:-1]:
        return "arguments that the body refuses, or of two dtypes"
    return floating(input)


@cat_gelu.cuda("generated", when=_side_by_side)
def _(k: Launcher, input: Array, hidden: Array, approximate: str) -> Array:
    return k.concatenated([input, hidden], input.ndim - 1, input.dtype, ["x", f"{_GELU[approximate]}(x)"])


@cat_gelu.cuda_vjp("generated", "input", when=_side_by_side)
def _(k: Launcher, g: Array, input_shape: Shape) -> Array:
    return g[..., : input_shape[-1]]


@cat_gelu.cuda_vjp("generated", "hidden", when=_side_by_side)
def _(k: Launcher, g: Array, hidden: Array, approximate: str, targets: GradTargets) -> Array:
    behind = g[..., g.shape[-1] - hidden.shape[-1] :]
    slope = f"g * {_GELU[approximate]}_derivative(hidden)"
    operands = {"g": behind, "hidden": hidden}
    return broadcast_grad(k, slope, operands, hidden.shape, targets["hidden"])


@composite(aux=("mean", "rstd"))
def layer_norm_modulate(input: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """layer_norm(input) * (1 + scale) + shift over the last dim: a DiT block's conditioning (arXiv 2212.09748)

    scale and shift broadcast to input: (B, 1, D) for one value an image.
    """
    normed: Tensor = layer_norm(input, (size_along(input.shape, -1, "layer_norm_modulate"),), eps=eps)
    return normed * (scale + 1.0) + shift


layer_norm_modulate.errors(
    ErrorSample(sample((), (4,), (4,)), ShapeError, "layer_norm_modulate: expected a tensor of at least 1 dim"),
    ErrorSample(sample((2, 4), (3,), (4,)), ShapeError, r"\(2, 4\), other \(3,\) do not broadcast together"),
)
layer_norm_modulate.samples(sample((2, 3, 4), (2, 1, 4), (2, 1, 4)), sample((3, 5), (5,), (3, 5), 1e-3))


def _modulated(input: Array, scale: Array, shift: Array) -> str:
    for x in (scale, shift):
        found = shared(x, input.shape) if input.ndim else None
        if found is None or found[0] * found[1] * input.shape[-1] != input.size:
            return "scale or shift broadcast in another way than one row for each run of rows"
    return why_not_rows(input, 1, scale, shift)


@layer_norm_modulate.cuda("rows", when=_modulated)
def _(k: Launcher, input: Array, scale: Array, shift: Array, eps: float) -> tuple[Array, Array, Array]:
    tables = {"scale": table(k, scale, input.shape), "shift": table(k, shift, input.shape)}
    return normalized_rows(k, "c * rstd * (1.f + scale) + shift", input, tables, eps)


@layer_norm_modulate.cuda_vjp("rows", "input", "scale", "shift", when=_modulated)
def _(
    k: Launcher, g: Array, input: Array, scale: Array, shift: Array, moments: Moments, targets: GradTargets
) -> tuple[Array | None, ...]:
    addend, added, out = target_rows(k, targets.get("input", ALLOCATE), 1)
    rows = {"g": rows_at(k, g), "input": rows_at(k, input), **addend}
    numbers = moments.numbers()
    operands = Operands(rows, {"scale": table(k, scale, input.shape)}, numbers)
    program = gradient_program("g * (1.f + scale)", added) if "input" in targets else Program(())
    wanted = {n: x for n, x in (("scale", scale), ("shift", shift)) if n in targets}
    groups = {table(k, x, input.shape).count for x in wanted.values()} or {1}
    if len(groups) == 1 and max(groups) <= k.tuning.modulate_groups:
        sums = [_SUMS[n] for n in wanted]
        made, totals = row_program_with_sums(
            k, program, sums, operands, input, out=out, groups=groups.pop(), summed=scale.dtype
        )
    else:
        made = row_program(k, program, operands, input.dtype, input.shape, 1, out) if program.rows else None
        dense = Operands({"g": rows_of(k, g), "input": rows_of(k, input)}, {}, numbers)
        totals = [_to_shared(k, _SUMS[n], dense, x, input.shape) for n, x in wanted.items()]
    found = {
        n: broadcast_grad(k, "g", {"g": t.reshape(x.shape)}, x.shape, targets[n])
        for (n, x), t in zip(wanted.items(), totals, strict=True)
    }
    return made, found.get("scale"), found.get("shift")


_SUMS = {"scale": SUMS["weight"], "shift": SUMS["bias"]}


def _to_shared(k: Launcher, each: str, operands: Operands, x: Array, shape: Shape) -> Array:
    """Returns the gradient of rows shared like those of `x`, in fp32: sums of `each` over the rows that share one."""
    found = shared(x, shape)
    assert found is not None
    run, count = found
    total: Array = k.columns([Reduction("sum", each)], operands, Extent(count, run, shape[-1]), float32)[0]
    return total


layer_norm_modulate.perf_samples(sample((2, 77, 640), (2, 1, 640), (2, 1, 640)), sample((300, 3072), (3072,), (3072,)))


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
