"""Group norms of images in NCHW, where a group's values follow one another: rows and planes of generated kernels."""

from __future__ import annotations

import math
from typing import Any

from ...backend.cuda.codegen.kernel_ir import Operands, Program, Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, bool_, float32, promote_floats
from ..common.channel_stats import no_planes, slopes
from ..common.conditions import floating
from ..common.dims import Shape
from ..common.row_kernels import reduce, why_not_rows

_MOMENTS = Program(
    ("sum s = input", "let mean = s / n", "sum square = (input - mean) * (input - mean)"),
    (),
    ("mean", "1.f / sqrtf(square / n + eps)"),
)
_OF_GROUP = Program(("sum s = even", "sum t = tilt"), (), ("s", "t"))


def no_group_planes(input: Array, num_groups: int, weight: Array | None, bias: Array | None, layout: str) -> str:
    """Says why these kernels cannot take a group norm; "" if they can.

    Args:
        input, num_groups, weight, bias, layout: as in `group_norm`.
    """
    if reason := floating(input, weight, bias):
        return reason
    if layout != "NCHW" or input.ndim < 3 or input.size == 0 or input.dtype == bool_:
        return "channels last, or nothing to compute with"
    channels, pixels = input.shape[1], math.prod(input.shape[2:])
    if num_groups < 1 or channels % num_groups or any(w is not None and w.shape != (channels,) for w in (weight, bias)):
        return "arguments that are refused"
    return "one pixel" if pixels == 1 else no_planes((1, len(input) * channels, pixels), input.dtype.itemsize)


def _sizes(shape: Shape, groups: int) -> Shape:
    """Returns (B, groups, channels of a group, pixels)."""
    return shape[0], groups, shape[1] // groups, math.prod(shape[2:])


def _of_channel(a: Array | None, sizes: Shape, missing: float) -> Any:
    """Returns a weight (C,) that meets (B, groups, channels of a group, ...); `missing` for None."""
    return missing if a is None else a.reshape(1, sizes[1], sizes[2], 1)


def forward(
    k: Launcher, input: Array, num_groups: int, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """Returns the normalised images, and the groups' means and reciprocal deviations (B, groups, 1) in fp32.

    Args:
        input: (B, C, ...).
        num_groups: groups of channels.
        weight, bias: (C,), or None.
    """
    x, sizes = k.contiguous(input), _sizes(input.shape, num_groups)
    rows = x.reshape(sizes[0] * num_groups, -1)
    if why_not_rows(rows, 1):
        rstd, mean = k.moments(rows[..., None], "1.f / sqrtf(total / n + eps)", {"eps": eps}, float32)
    else:
        mean, rstd = k.rows(_MOMENTS, Operands({"input": rows}, numbers={"eps": eps}), (float32, float32))
    kept = (sizes[0], num_groups, 1)
    operands = {
        "input": x.reshape(sizes),
        "mean": mean.reshape(*kept, 1),
        "rstd": rstd.reshape(*kept, 1),
        "weight": _of_channel(weight, sizes, 1.0),
        "bias": _of_channel(bias, sizes, 0.0),
    }
    dtype = promote_floats([a.dtype for a in (input, weight, bias) if a is not None])
    y = k.elementwise(("(input - mean) * rstd * weight + bias",), operands, (dtype,), sizes)[0]
    return y.reshape(input.shape), mean.reshape(kept), rstd.reshape(kept)


def gradients(
    k: Launcher, g: Array, input: Array, weight: Array | None, mean: Array, rstd: Array, needs: frozenset[str]
) -> tuple[Array | None, Array, Array]:
    """Returns the gradients of input, weight and bias; None for an input's that is not needed.

    Args:
        g: the gradient of the result.
        input: (B, C, ...).
        weight: (C,), or None.
        mean, rstd: (B, groups, 1).
        needs: the arguments whose gradients are wanted.
    """
    sizes = b, groups, each, pixels = _sizes(input.shape, mean.shape[1])
    x, g = k.contiguous(input).reshape(sizes), k.contiguous(g).reshape(sizes)
    planes, of_plane = (1, b * groups * each, pixels), (b, groups, each, 1)
    mean, rstd = mean.reshape(b, groups, 1, 1), rstd.reshape(b, groups, 1, 1)
    means = k.contiguous(k.xp.broadcast_to(mean, of_plane)).reshape(-1)
    sums, tilts = slopes(k, g.reshape(planes), x.reshape(planes), means)
    # Of each plane: its part in the bias' and in the weight's gradient, in the group's sums, and the slope.
    operands = {
        "a": sums.reshape(of_plane),
        "b": tilts.reshape(of_plane),
        "rstd": rstd,
        "weight": _of_channel(weight, sizes, 1.0),
        "part": 1.0 / (each * pixels),
    }
    values = ("b * rstd", "a * weight * rstd * part", "b * weight * rstd * rstd * rstd * part", "rstd * weight")
    dw, even, tilt, slope = k.elementwise(values, operands, (float32,) * 4, of_plane)
    by_channel = [reduce(k, Reduction("sum", "each"), {"each": a.reshape(b, -1)}, (0,), float32)[0] for a in (dw, sums)]
    if "input" not in needs:
        return None, *by_channel
    if each > 1:
        rows = {n: a.reshape(b * groups, each) for n, a in (("even", even), ("tilt", tilt))}
        even, tilt = (a.reshape(b, groups, 1, 1) for a in k.rows(_OF_GROUP, Operands(rows), (float32, float32)))
    operands = {"input": x, "g": g, "mean": mean, "even": even, "tilt": tilt, "slope": slope}
    dx = k.elementwise(("g * slope - even - (input - mean) * tilt",), operands, (input.dtype,), sizes)[0]
    return dx.reshape(input.shape), *by_channel
