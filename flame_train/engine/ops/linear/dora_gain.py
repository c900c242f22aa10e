"""DoRA's factor on a layer's input or output (arXiv 2402.09353), from products as small as the low-rank matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32, promote_floats
from ...namespace import Namespace
from ...op import ErrorSample, Sample, primitive, sample
from ...op_samples import Values
from ..common import conditions
from ..common.dims import axis

_THREADS = 128
_SMALLEST = float(np.finfo(np.float32).eps)  # a row of zeros has no direction


@primitive(aux=("norm",))
def dora_gain(
    xp: Namespace,
    magnitude: Array,
    squares: Array,
    crossed: Array,
    own: Array,
    squared: Array,
    scale: float,
    dim: int,
) -> tuple[Array, Array]:
    """magnitude / |W + scale * up @ down| - 1, with the norm of each row (dim 0) or input column (dim 1) of the weight

    |W + s B|^2 = |W|^2 + 2 s <W, B> + s^2 |B|^2 with B = up @ down. For rows <W, B> is up * (W @ down^T), summed over
    ranks, and |B|^2 is up * (up @ down @ down^T). For columns it is down * (up^T @ W) and down * (up^T @ up @ down).
    The 1 is taken away because what is left is small, and a narrow float holds more of its digits.
    No gradient goes through the norm (section 4.3 of the paper, and PEFT).

    Args:
        magnitude: (n,), of the weight's rows or input columns.
        squares: (n,), |W|^2 of each.
        crossed: up as (n, rank), or down as (rank, n * kernel).
        own: W @ down^T or up^T @ W, of the same shape.
        squared: up @ down @ down^T or up^T @ up @ down, of the same shape.
        dim: 0: rows, 1: input columns.

    Returns:
        (n,), and the norms (n,).
    """
    n, dim = _check(magnitude, squares, crossed, own, squared, dim)
    terms = crossed * (own * (2.0 * scale) + squared * (scale * scale))
    extra = terms.sum(1) if dim == 0 else terms.reshape(len(crossed), n, -1).sum((0, 2))
    norm = xp.sqrt(xp.maximum(squares + extra, _SMALLEST * _SMALLEST))
    return magnitude / norm - 1.0, norm


dora_gain.vjp("magnitude")(lambda xp, g, norm: g / norm)


@dora_gain.cuda_vjp(
    "generated", "magnitude", when=lambda magnitude: conditions.same(conditions.AT_MOST_FP32, magnitude)
)
def _(k: Launcher, g: Array, norm: Array) -> Array:
    return k.elementwise(("g / norm",), {"g": g, "norm": norm}, (g.dtype,))[0]


dora_gain.non_differentiable("squares", "crossed", "own", "squared")


def _check(magnitude: Array, squares: Array, crossed: Array, own: Array, squared: Array, dim: int) -> tuple[int, int]:
    """Returns the number of norms, and dim counted from the front."""
    dim = axis(dim, 2, "dora_gain")
    n = math.prod(magnitude.shape)
    along = crossed.shape[dim] if crossed.ndim == 2 else -1
    whole = along == n if dim == 0 else n > 0 and along % n == 0
    if not (magnitude.shape == squares.shape == (n,) and crossed.shape == own.shape == squared.shape and whole):
        raise ShapeError(
            f"dora_gain: expected two of (n,) and three of {'(n, rank)' if dim == 0 else '(rank, n * kernel)'}, got "
            f"{', '.join(str(tuple(a.shape)) for a in (magnitude, squares, crossed, own, squared))}"
        )
    return n, dim


def _condition(magnitude: Array, squares: Array, crossed: Array, own: Array, squared: Array) -> str:
    if not {magnitude.dtype, squares.dtype} <= conditions.AT_MOST_FP32:
        return "magnitudes or squared norms in fp64"
    return conditions.same(conditions.AT_MOST_FP32, crossed, own, squared) or ("" if crossed.size else "nothing to sum")


@dora_gain.cuda("sums", when=_condition)
def _(
    k: Launcher, magnitude: Array, squares: Array, crossed: Array, own: Array, squared: Array, scale: float, dim: int
) -> tuple[Array, Array]:
    n, dim = _check(magnitude, squares, crossed, own, squared, dim)
    rank, taps = (crossed.shape[1], 1) if dim == 0 else (crossed.shape[0], crossed.shape[1] // n)
    strides = (1, rank) if dim == 0 else (n * taps, taps)
    gain, norm = k.empty((n,), float32), k.empty((n,), float32)
    arrays = [k.cast(k.contiguous(a), float32) for a in (magnitude, squares)]
    arrays += [k.contiguous(a) for a in (crossed, own, squared)]
    numbers = (*map(np.int32, (n, rank, taps)), *map(np.int64, strides), np.float32(scale))
    args = (*arrays, gain, norm, *numbers)
    k.launch_header("ops/linear/dora_gain.cuh", "dora_gain", {"T": crossed.dtype}, (-(-n // _THREADS),), _THREADS, args)
    return k.cast(gain, promote_floats([a.dtype for a in (magnitude, squares, crossed, own, squared)])), norm


def _samples() -> Iterator[Sample]:
    for n, matrix, scale, dim in ((6, (6, 2), 0.5, 0), (6, (2, 6), 0.5, 1), (3, (2, 12), 0.25, 1)):
        yield sample((n,), Values((n,), 40.0, 60.0), matrix, matrix, matrix, scale, dim)


dora_gain.samples(*_samples())
dora_gain.errors(
    ErrorSample(sample((6,), (6,), (5, 2), (5, 2), (5, 2), 0.5, 0), ShapeError, r"three of \(n, rank\), got "),
    ErrorSample(sample((6,), (5,), (2, 6), (2, 6), (2, 6), 0.5, 1), ShapeError, r"three of \(rank, n \* kernel\)"),
)
