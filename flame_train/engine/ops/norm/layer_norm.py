"""Layer normalisation. Statistics are taken in fp32 or fp64, whatever the input's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....errors import ShapeError
from ...arguments import Arguments
from ...autograd.grad_target import ALLOCATE, GradTargets
from ...backend.cuda.codegen.kernel_ir import Operands, Program, Table
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32, promote_floats
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common.elementwise_codegen import broadcast_grad
from ..common.row_kernels import one_row, row_program_with_sums, rows_at, target_rows, why_not_rows


@primitive(torch="nn.functional.layer_norm", aux=("mean", "rstd"))
def layer_norm(
    xp: Namespace,
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array]:
    """(input - mean) / sqrt(var + eps) * weight + bias over the last dims (arXiv 1607.06450)

    Args:
        normalized_shape: the input's last dims.
        weight, bias: in that shape, or None.

    Returns:
        In input's shape; and each row's mean and reciprocal deviation, (..., 1).
    """
    check_normalized("layer_norm", input, normalized_shape, weight, bias)
    axes = tuple(range(-len(normalized_shape), 0))
    mean = xp.mean(input, axis=axes, keepdims=True)
    centred = input - mean
    rstd = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias), mean, rstd


def check_normalized(op: str, input: Array, normalized_shape: Sequence[int], *weights: Array | None) -> None:
    """Raises ShapeError unless the input ends in the dims to be normalised, of which there is one, and weights fit."""
    n, shape = len(normalized_shape), tuple(normalized_shape)
    if n == 0 or tuple(input.shape[-n:]) != shape:
        raise ShapeError(f"{op}: expected input ending in {shape or 'one dim or more'}, got {tuple(input.shape)}")
    for w in weights:
        if w is not None and tuple(w.shape) != shape:
            raise ShapeError(f"{op}: expected weights of shape {shape}, got {tuple(w.shape)}")


@layer_norm.vjp("input")
def _(
    xp: Namespace,
    g: Array,
    input: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    normalized_shape: Sequence[int],
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    xhat = (input - mean) * rstd
    gw = g if weight is None else g * weight
    slope = xp.mean(gw * xhat, axis=axes, keepdims=True)
    return rstd * (gw - xp.mean(gw, axis=axes, keepdims=True) - xhat * slope)


layer_norm.vjp("weight")(lambda xp, g, input, mean, rstd: g * (input - mean) * rstd)
layer_norm.vjp("bias")(lambda xp, g: g)
layer_norm.samples(
    sample((2, 3, 8), (8,), (8,), (8,)), sample((3, 5), (5,), None, None, 1e-2), sample((2, 3, 4), (3, 4), (3, 4), None)
)
layer_norm.errors(
    ErrorSample(sample((2, 3), (4,)), ShapeError, r"ending in \(4,\), got \(2, 3\)"),
    ErrorSample(sample((2, 3), ()), ShapeError, "ending in one dim or more"),
    ErrorSample(sample((2, 3), (3,), (1,)), ShapeError, r"weights of shape \(3,\), got \(1,\)"),
)


# ---- our kernels -------------------------------------------------------------------------------------------------


def _layer_condition(input: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None) -> str:
    return why_not(input, normalized_shape, weight, bias) or why_not_rows(input, len(normalized_shape), weight, bias)


def why_not(input: Array, normalized_shape: Sequence[int], *weights: Array | None) -> str:
    """Returns what `check_normalized` refuses."""
    n, shape = len(normalized_shape), tuple(normalized_shape)
    fits = n and tuple(input.shape[-n:]) == shape and all(w is None or tuple(w.shape) == shape for w in weights)
    return "" if fits else "shapes do not fit"


_CENTRED = (
    "sum s = input",
    "let mean = s / n",
    "row c = input - mean",
    "sum q = c * c",
    "let rstd = rsqrtf(q / n + eps)",
)
"""Steps to a row's mean, its elements less that, and their scale."""


@layer_norm.cuda("rows", when=_layer_condition)
def _(
    k: Launcher, input: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    tables = one_row(k, weight=weight, bias=bias)
    value = f"c * rstd{' * weight' if 'weight' in tables else ''}{' + bias' if 'bias' in tables else ''}"
    return normalized_rows(k, value, input, tables, eps, len(normalized_shape))


def normalized_rows(
    k: Launcher, value: str, input: Array, tables: Mapping[str, Table], eps: float, dims: int = 1
) -> tuple[Array, Array, Array]:
    """Returns `value` over each normalised row, c * rstd, and `tables`; and the rows' mean and rstd, (..., 1).

    Args:
        value: the expression in C.
        tables: rows that others share, by name.
        dims: the number of last dims that make a row.

    Returns:
        The result in input's shape; each row's mean and reciprocal deviation, fp32 (..., 1).
    """
    operands = Operands({"input": rows_at(k, input, dims)}, tables, {}, {"eps": eps})
    dtype = promote_floats([input.dtype, *(t.array.dtype for t in tables.values())])
    y, mean, rstd = k.rows(Program(_CENTRED, (value,), ("mean", "rstd")), operands, (dtype, float32, float32))
    shape = (*input.shape[: input.ndim - dims], *[1] * dims)
    return y.reshape(input.shape), mean.reshape(shape), rstd.reshape(shape)


@dataclass(frozen=True, slots=True)
class Moments(Arguments):
    """Each row's mean and the reciprocal of its standard deviation."""

    mean: Array
    rstd: Array

    def numbers(self) -> dict[str, Array]:
        """Returns the same as row kernels take them."""
        return {"mean": self.mean.reshape(-1), "rstd": self.rstd.reshape(-1)}


@layer_norm.cuda_vjp("rows", "input", "weight", "bias", when=_layer_condition)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    normalized_shape: Sequence[int],
    weight: Array | None,
    moments: Moments,
    targets: GradTargets,
) -> tuple[Array | None, ...]:
    dims = len(normalized_shape)
    addend, added, out = target_rows(k, targets.get("input", ALLOCATE), dims)
    rows = {"g": rows_at(k, g, dims), "input": rows_at(k, input, dims), **addend}
    operands = Operands(rows, one_row(k, weight=weight), moments.numbers())
    program = gradient_program("g" if weight is None else "g * weight", added) if "input" in targets else Program(())
    sums = {n: text for n, text in SUMS.items() if n in targets}
    kind = float32 if weight is None else weight.dtype
    made, totals = row_program_with_sums(k, program, [*sums.values()], operands, input, dims, out, summed=kind)
    found = summed(k, dict(zip(sums, totals, strict=True)), normalized_shape, targets)
    return made, found.get("weight"), found.get("bias")


def summed(k: Launcher, totals: Mapping[str, Array], shape: Sequence[int], targets: GradTargets) -> dict[str, Array]:
    """Gradients of arguments of `shape`, each added to what has already arrived."""
    return {n: broadcast_grad(k, "g", {"g": t.reshape(shape)}, tuple(shape), targets[n]) for n, t in totals.items()}


SUMS = {"weight": "g * (input - mean) * rstd", "bias": "g"}
"""What the gradients of a weight and a bias are sums of."""


def gradient_program(slope: str, added: str) -> Program:
    """Turns `slope`, the gradient of the normalised row, into the input's; `added` is a further addend."""
    steps = (
        f"sum a = {slope}",
        f"sum b = {slope} * (input - mean)",
        "let t = b * rstd * rstd * (1.f / n)",
        "let m = a * (1.f / n)",
    )
    return Program(steps, (f"rstd * ({slope} - m - (input - mean) * t){added}",))


layer_norm.perf_samples(
    sample((2, 77, 1280), (1280,), (1280,), (1280,)),
    sample((1023, 640), (640,), (640,), (640,)),
    sample((5, 8), (8,), (8,), (8,)),
    sample((300, 3072), (3072,)),
    sample((77, 130), (130,), (130,)),
)
