"""Root-mean-square normalisation, rotary positions, and the two together as transformers use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import ALLOCATE, GradTargets
from ...backend.cuda.codegen.kernel_ir import Operands, Program, Table
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32, promote_floats
from ...namespace import Namespace
from ...op import ErrorSample, composite, primitive, sample
from ...tensors.tensor import Tensor
from ..common.conditions import floating
from ..common.dims import Shape, size_along
from ..common.elementwise_codegen import broadcast_grad
from ..common.row_kernels import (
    one_row,
    row_program,
    row_program_with_sums,
    rows_at,
    shared,
    table,
    target_rows,
    why_not_rows,
)
from .layer_norm import check_normalized, summed, why_not


@primitive(torch="nn.functional.rms_norm", aux=("rstd",))
def rms_norm(
    xp: Namespace, input: Array, normalized_shape: Sequence[int], weight: Array | None = None, eps: float | None = None
) -> tuple[Array, Array]:
    """input / sqrt(mean(input^2) + eps) * weight over the last dims (arXiv 1910.07467)

    eps is the working precision's machine epsilon if not given: fp32's for all narrower floats.

    Args:
        normalized_shape: the input's last dims.
        weight: in that shape, or None.
        eps: is added to the mean square; None: the dtype's epsilon.

    Returns:
        In input's shape; and each row's reciprocal root mean square, (..., 1).
    """
    check_normalized("rms_norm", input, normalized_shape, weight)
    axes = tuple(range(-len(normalized_shape), 0))
    small = eps if eps is not None else float(np.finfo(input.dtype).eps)
    rstd = 1.0 / xp.sqrt(xp.mean(input * input, axis=axes, keepdims=True) + small)
    y = input * rstd
    return (y if weight is None else y * weight), rstd


@rms_norm.vjp("input")
def _(
    xp: Namespace, g: Array, input: Array, weight: Array | None, rstd: Array, normalized_shape: Sequence[int]
) -> Array:
    axes = tuple(range(-len(normalized_shape), 0))
    gw, xhat = g if weight is None else g * weight, input * rstd
    return rstd * (gw - xhat * xp.mean(gw * xhat, axis=axes, keepdims=True))


rms_norm.vjp("weight")(lambda xp, g, input, rstd: g * input * rstd)


def _whole_rows(input: Array, normalized_shape: Sequence[int], weight: Array | None) -> str:
    return why_not(input, normalized_shape, weight) or why_not_rows(input, len(normalized_shape), weight)


def _weighted(k: Launcher, weight: Array | None) -> tuple[dict[str, Table], str]:
    """Returns the weight as a shared row, and what to multiply by."""
    return one_row(k, weight=weight), "" if weight is None else " * weight"


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines as shared rows, and whether pairs are neighbours; no rows where nothing is rotated."""

    rows: dict[str, Table] = field(default_factory=dict)
    interleaved: bool = True

    def rotated(self, name: str) -> str:
        """Returns what a program calls the pairs of its row `name`, each (a, b) as (-b, a)."""
        return f"{'rotate_every_two' if self.interleaved else 'rotate_half'}({name})"


UNROTATED = Angles()
_LONGEST_HALVES = 512
"""Elements of a row whose halves are pairs: threads hold all of them by twos or more."""


def norm_rows(
    k: Launcher,
    input: Array,
    weight: Array | None,
    eps: float,
    angles: Angles,
    dims: int = 1,
    out: Sequence[Array] = (),
) -> tuple[Array, Array]:
    """Rows (..., C) of the last `dims` dims, normalised and then rotated, and their rstd (R,); or `out` with both.

    Args:
        input: (..., C).
        weight: (C,), or None.
        angles: cosines and sines, or none.
        dims: the number of last dims that make a row.

    Returns:
        The rows, and `rstd` (R,), fp32.
    """
    tables, by = _weighted(k, weight)
    turned = (f"row x = input * rstd{by}",) if angles.rows else ()
    value = f"x * cosine + {angles.rotated('x')} * sine" if angles.rows else f"input * rstd{by}"
    steps = ("sum s = input * input", "let rstd = rsqrtf(s / n + eps)", *turned)
    dtype = input.dtype if weight is None else promote_floats([input.dtype, weight.dtype])
    operands = Operands({"input": rows_at(k, input, dims)}, tables | angles.rows, {}, {"eps": eps})
    y, rstd = k.rows(Program(steps, (value,), ("rstd",)), operands, (dtype, float32), out)
    return y, rstd


def norm_gradients(
    k: Launcher,
    g: Array,
    input: Array,
    weight: Array | None,
    rstd: Array,
    angles: Angles,
    targets: GradTargets,
    dims: int = 1,
) -> tuple[Array | None, Array | None]:
    """Returns the gradients to what `norm_rows` was given: the input's, in its shape, and the weight's.

    Args:
        g: the gradient of the result, in input's shape.
        input, weight, angles, dims: as `norm_rows` was given.
        rstd: as it was returned, one a row.
        targets: where "input" and "weight" go; what is not among them is None.
    """
    tables, by = _weighted(k, weight)
    more, added, out = target_rows(k, targets.get("input", ALLOCATE), dims)
    # `d` already has the weight where only the input's gradient reads it
    within, outside = ("", by) if "weight" in targets or not angles.rows else (by, "")
    steps = ["row t = g * sine", f"row d = (g * cosine - {angles.rotated('t')}){within}"] if angles.rows else []
    d, outputs = "d" if angles.rows else "g", []
    if "input" in targets:
        steps += [f"sum s = {d}{outside} * input", "let q = s * rstd * rstd / n"]
        outputs += [f"rstd * ({d}{outside} - input * q){added}"]
    rows = {"g": rows_at(k, g, dims), "input": rows_at(k, input, dims), **more}
    operands = Operands(rows, tables | angles.rows, {"rstd": rstd.reshape(-1)})
    sums = {n: f"{d} * input * rstd" for n in ("weight",) if n in targets}
    program = Program(tuple(steps), tuple(outputs))
    kind = float32 if weight is None else weight.dtype
    made, totals = row_program_with_sums(k, program, [*sums.values()], operands, input, dims, out, summed=kind)
    found = summed(k, dict(zip(sums, totals, strict=True)), input.shape[input.ndim - dims :], targets)
    return made, found.get("weight")


@rms_norm.cuda("rows", when=_whole_rows)
def _(
    k: Launcher, input: Array, normalized_shape: Sequence[int], weight: Array | None, eps: float | None
) -> tuple[Array, Array]:
    dims, small = len(normalized_shape), eps if eps is not None else float(np.finfo(np.float32).eps)
    y, rstd = norm_rows(k, input, weight, small, UNROTATED, dims)
    return y.reshape(input.shape), rstd.reshape((*input.shape[:-dims], *[1] * dims))


@rms_norm.cuda_vjp("rows", "input", "weight", when=_whole_rows)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    weight: Array | None,
    rstd: Array,
    normalized_shape: Sequence[int],
    targets: GradTargets,
) -> tuple[Array | None, ...]:
    return norm_gradients(k, g, input, weight, rstd, UNROTATED, targets, len(normalized_shape))


rms_norm.perf_samples(
    sample((3, 77, 640), (640,), (640,), 1e-6), sample((200, 24, 128), (128,), (128,)), sample((9, 3072), (3072,))
)
rms_norm.samples(sample((2, 3, 8), (8,), (8,), 1e-6), sample((3, 5), (5,)), sample((2, 3, 4), (3, 4), (3, 4), 1e-2))
rms_norm.errors(ErrorSample(sample((2, 3), (4,)), ShapeError, r"ending in \(4,\), got \(2, 3\)"))


@primitive()
def rope(xp: Namespace, input: Array, cos: Array, sin: Array, interleaved: bool = True) -> Array:
    """input * cos + rotate_half(input) * sin along the last dim: pairs of numbers turned by an angle (arXiv 2104.09864)

    A pair is two neighbours (Flux), or with interleaved=False two elements half the dim apart (LLaMA). cos and sin
    have an entry for each element, in an order of the same kind, and broadcast over the other dims.

    Args:
        input: (..., C), C even.

    Returns:
        In input's shape.
    """
    return input * cos + _rotate_half(xp, _even(input), interleaved) * sin


def _even(x: Array) -> Array:
    if size_along(x.shape, -1, "rope") % 2:
        raise ShapeError(f"rope: expected an even last dim, got {tuple(x.shape)}")
    return x


def _rotate_half(xp: Namespace, x: Array, interleaved: bool) -> Array:
    """Returns each pair (a, b) as (-b, a)."""
    if interleaved:
        return xp.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    half = x.shape[-1] // 2
    return xp.concatenate([-x[..., half:], x[..., :half]], axis=-1)


rope.vjp("input")(lambda xp, g, cos, sin, interleaved: g * cos - _rotate_half(xp, g * sin, interleaved))
rope.vjp("cos")(lambda xp, g, input: g * input)
rope.vjp("sin")(lambda xp, g, input, interleaved: g * _rotate_half(xp, input, interleaved))


def _pairs(input: Array, cos: Array, sin: Array, interleaved: bool) -> str:
    if input.ndim == 0 or input.shape[-1] % 2:
        return "no pairs"
    if not interleaved and (input.shape[-1] % 8 or input.shape[-1] > _LONGEST_HALVES):
        return f"pairs of halves other than 8 to {_LONGEST_HALVES} elements in eights"
    if shared(cos, input.shape) is None or shared(sin, input.shape) is None:
        return "cos or sin broadcast in another way than by rows"
    return why_not_rows(input, 1, cos, sin)


def angle_rows(k: Launcher, cos: Array, sin: Array, shape: Shape, interleaved: bool = True) -> Angles:
    """Cosines and sines as rows shared among those of `shape`.

    Args:
        cos, sin: (..., C), broadcast to `shape`.
        shape: (..., C), of what is rotated.
    """
    return Angles({"cosine": table(k, cos, shape), "sine": table(k, sin, shape)}, interleaved)


@rope.cuda("rows", when=_pairs)
def _(k: Launcher, input: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    angles = angle_rows(k, cos, sin, input.shape, interleaved)
    program = Program(("row x = input",), (f"x * cosine + {angles.rotated('x')} * sine",))
    operands = Operands({"input": rows_at(k, input)}, angles.rows)
    dtype = promote_floats([input.dtype, cos.dtype, sin.dtype])
    return k.rows(program, operands, (dtype,))[0].reshape(input.shape)


@rope.cuda_vjp("rows", "input", when=_pairs, accumulates=False)
def _(k: Launcher, g: Array, input: Array, cos: Array, sin: Array, interleaved: bool, targets: GradTargets) -> Array:
    angles = angle_rows(k, cos, sin, g.shape, interleaved)
    program = Program(("row t = g * sine",), (f"g * cosine - {angles.rotated('t')}",))
    operands = Operands({"g": rows_at(k, g)}, angles.rows)
    return row_program(k, program, operands, input.dtype, g.shape, 1, targets["input"].buffer)


@rope.cuda_vjp("rows", "cos", when=_pairs)
def _(k: Launcher, g: Array, input: Array, cos_shape: Shape) -> Array:
    return broadcast_grad(k, "g * input", {"g": g, "input": input}, cos_shape)


@rope.cuda_vjp("rows", "sin", when=_pairs)
def _(k: Launcher, g: Array, input: Array, interleaved: bool, sin_shape: Shape) -> Array:
    program = Program(("row x = input",), (f"g * {Angles(interleaved=interleaved).rotated('x')}",))
    each = row_program(k, program, Operands({"g": rows_at(k, g), "input": rows_at(k, input)}), float32, g.shape, 1)
    return broadcast_grad(k, "g", {"g": each}, sin_shape)


rope.perf_samples(
    sample((2, 3, 300, 128), (300, 128), (300, 128)),
    sample((2, 300, 3, 64), (300, 1, 64), (300, 1, 64)),
    sample((2, 300, 3, 128), (300, 1, 128), (300, 1, 128), False),
)
rope.samples(
    sample((2, 2, 3, 4), (3, 4), (3, 4)),
    sample((2, 3, 6), (3, 6), (3, 6), False),
    sample((2, 3, 24), (3, 24), (3, 24), False),
)
rope.errors(ErrorSample(sample((2, 3), (3,), (3,)), ShapeError, "rope: expected an even last dim"))


@composite(aux=("rstd",))
def rms_norm_rope(
    input: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float = 1e-6, interleaved: bool = True
) -> Tensor:
    """rope(rms_norm(input) over the last dim): queries and keys of a transformer that normalises them

    cos and sin may be wider than the result, which has the dtype of input and weight.

    Args:
        input: (..., C), C even.
        weight: (C,), or None.

    Returns:
        In input's shape.
    """
    normed: Tensor = rms_norm(input, (size_along(input.shape, -1, "rms_norm_rope"),), weight, eps)
    return rope(normed, cos, sin, interleaved).to(normed.dtype)


rms_norm_rope.errors(
    ErrorSample(sample((2, 3), None, (3,), (3,)), ShapeError, "rope: expected an even last dim"),
    ErrorSample(sample((), None, (), ()), ShapeError, "rms_norm_rope: expected a tensor of at least 1 dim"),
)
rms_norm_rope.samples(
    sample((2, 2, 3, 4), (4,), (3, 4), (3, 4)),
    sample((2, 3, 6), None, (3, 6), (3, 6), 1e-3, False),
    sample((2, 3, 16), (16,), (3, 16), (3, 16), 1e-3, False),
)


def _pairs_of_norm(input: Array, weight: Array | None, cos: Array, sin: Array, interleaved: bool) -> str:
    if weight is not None and weight.shape != input.shape[-1:]:
        return "shapes do not fit"
    return _pairs(input, cos, sin, interleaved) or floating(input, weight)


@rms_norm_rope.cuda("rows", when=_pairs_of_norm)
def _(
    k: Launcher, input: Array, weight: Array | None, cos: Array, sin: Array, eps: float, interleaved: bool
) -> tuple[Array, Array]:
    y, rstd = norm_rows(k, input, weight, eps, angle_rows(k, cos, sin, input.shape, interleaved))
    return y.reshape(input.shape), rstd.reshape((*input.shape[:-1], 1))


@rms_norm_rope.cuda_vjp("rows", "input", "weight", when=_pairs_of_norm)
def _(
    k: Launcher,
    g: Array,
    input: Array,
    weight: Array | None,
    cos: Array,
    sin: Array,
    rstd: Array,
    interleaved: bool,
    targets: GradTargets,
) -> tuple[Array | None, ...]:
    angles = angle_rows(k, cos, sin, input.shape, interleaved)
    return norm_gradients(k, g, input, weight, rstd, angles, targets)


rms_norm_rope.perf_samples(
    sample((2, 3, 300, 128), (128,), (300, 128), (300, 128)),
    sample((2, 300, 3, 64), None, (300, 1, 64), (300, 1, 64)),
    sample((2, 300, 3, 128), (128,), (300, 1, 128), (300, 1, 128), 1e-6, False),
)
