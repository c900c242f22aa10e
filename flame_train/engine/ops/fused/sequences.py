"""Short sequences of ops that networks use often, as ops of their own, so that one kernel may replace all of one."""

from __future__ import annotations

from ....errors import ShapeError
from ...autograd.grad_target import ALLOCATE, GradTargets
from ...backend.cuda.codegen.kernel_ir import Extent, Operands, Program, Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32
from ...op import ErrorSample, composite, sample
from ...tensors.tensor import Tensor
from ..common.conditions import floating
from ..common.dims import Shape, size_along
from ..common.elementwise_codegen import broadcast_grad
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
from ..pointwise.activations import gelu
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
