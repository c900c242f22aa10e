"""Dropout, by random numbers that depend on position alone: the same on every device, and when recomputed."""

from __future__ import annotations

import math

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import ALLOCATE, GradTarget, GradTargets
from ...backend.cuda.codegen.rows import divisor
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...namespace import NUMPY, Namespace
from ...op import ErrorSample, primitive, sample
from ...random import DROPOUT, Rng, bits, check_rng, kernel_step, least_kept, round_keys, uniform_of
from ..common.conditions import AT_MOST_FP32, same
from ..common.dims import Shape
from ..common.drawn import drawn_next
from ..common.elementwise_codegen import broadcast_grad

_THREADS, _WORDS = 256, 1 << 32


@primitive(torch="nn.functional.dropout")
def dropout(
    xp: Namespace, input: Array, p: float = 0.5, training: bool = True, *, rng: Rng | None = None, stream: int = DROPOUT
) -> Array:
    """input with each element zeroed with probability p and the others divided by 1 - p (arXiv 1207.0580)

    Which ones is said by `rng`, whose samples are input's first dim, and `stream`; give every place of a network a
    stream of its own. Without an rng this thread's next numbers say it, as `manual_seed` began them. Without training,
    or with p = 0, input itself.

    Args:
        p: the probability of a zero, in [0, 1].
        training: whether anything is dropped.
        rng: the random numbers of a step; None: those after `manual_seed`.
        stream: the random numbers' stream.

    Returns:
        In input's shape.

    Raises:
        ValueError: a probability outside.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: expected a probability p in [0, 1], got {p}")
    scale = _scale(xp, input.shape, p, training, rng, stream)
    return input if scale is None else input * scale.astype(input.dtype)


def _scale(xp: Namespace, shape: Shape, p: float, training: bool, rng: Rng | None, stream: int) -> Array | None:
    """Returns the factor of each element: 0 or 1 / (1 - p)."""
    if not training or p == 0.0:
        return None
    rng = check_rng(rng, "dropout: training")
    count = int(np.prod(shape[1:]))
    words = bits(xp, rng.seed, stream, rng.step, xp.asarray(rng.samples), count)
    if not shape or words.shape[0] != shape[0]:
        raise ShapeError(f"dropout: rng has {words.shape[0]} samples, input {shape} another first dim")
    kept = uniform_of(words).reshape(shape) >= np.float32(p)
    return kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p))


dropout.fill_in = drawn_next("p")


@dropout.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, p: float, training: bool, rng: Rng | None, stream: int) -> Array:
    scale = _scale(xp, input_shape, p, training, rng, stream)
    return g if scale is None else g * scale.astype(g.dtype)


# ---- on the GPU ------------------------------------------------------------------------------------------


def _no_kernel(input: Array, p: float, training: bool, rng: Rng | None) -> str:
    """Says why the kernel cannot take an input; "" if it can."""
    if not 0.0 <= p <= 1.0:
        return "arguments that are refused"
    if not training or p == 0.0:
        return same(AT_MOST_FP32, input)
    if not isinstance(rng, Rng) or not input.ndim or rng.samples.size != input.shape[0]:
        return "arguments that are refused"
    if not 0 < input.shape[0] * -(-math.prod(input.shape[1:]) // 4) < 2**31 or not input.size:
        return "nothing to drop, or too much"
    return same(AT_MOST_FP32, input)


def _dropped(k: Launcher, x: Array, p: float, rng: Rng | None, stream: int, target: GradTarget = ALLOCATE) -> Array:
    """Returns `x` with its elements dropped, added to what has arrived at `target`."""
    rng, x = check_rng(rng, "dropout: training"), k.contiguous(x)
    addend = None if target.addend is None else k.contiguous(target.addend)
    out = target.buffer if target.addend is None or addend is target.buffer else None
    if out is None or not out.flags.c_contiguous:
        out = k.empty(x.shape, x.dtype if addend is None else addend.dtype)
    count, group = x.size // x.shape[0], 16 // x.itemsize
    odd = any(a.data.ptr % 16 for a in (x, out, addend) if a is not None)
    groups = -(-count // group)
    limit = least_kept(p)
    args = (
        x,
        np.int64(0) if addend is None else addend,
        out,
        k.contiguous(k.xp.asarray(rng.samples).reshape(-1).astype(np.int64, copy=False)),
        *kernel_step(rng.step),
        np.uint32(stream & (_WORDS - 1)),
        round_keys(rng.seed),
        np.uint32(min(limit, _WORDS - 1)),
        np.float32(0.0 if limit == _WORDS else 1.0 / (1.0 - p)),
        np.int64(count),
        *divisor(groups),
        np.uint32(groups * x.shape[0]),
    )
    names = {"T": x.dtype, "A": out.dtype, "WIDTH": 1 if odd else math.gcd(count, group)}
    grid = (-(-groups * x.shape[0] // _THREADS),)
    k.launch_header("ops/pointwise/dropout.cuh", "dropout", names, grid, _THREADS, args)
    return out


@dropout.cuda("philox", when=_no_kernel)
def _(k: Launcher, input: Array, p: float, training: bool, rng: Rng | None, stream: int) -> Array:
    return _dropped(k, input, p, rng, stream) if training and p else input


@dropout.cuda_vjp("philox", "input", when=_no_kernel)
def _(
    k: Launcher,
    g: Array,
    input_shape: Shape,
    p: float,
    training: bool,
    rng: Rng | None,
    stream: int,
    targets: GradTargets,
) -> Array:
    if training and p:
        return _dropped(k, g, p, rng, stream, targets["input"])
    return broadcast_grad(k, "g", {"g": g}, input_shape, targets["input"])


def _rng(samples: int) -> Rng:
    return Rng(NUMPY, 7, 3, np.arange(samples))


dropout.samples(
    sample((3, 4), 0.4, rng=_rng(3)),
    sample((2, 3, 4), 0.5, rng=_rng(2), stream=21),
    sample((3, 4), 0.4, False),
    sample((3, 4), 1.0, rng=_rng(3)),
)
dropout.perf_samples(
    sample((3, 70, 641), 0.1, rng=_rng(3)),
    sample((5, 1000, 24), 0.3, rng=_rng(5), stream=70_000),
    sample((2, 77, 640), 0.5, rng=Rng(NUMPY, -5, 2**32 - 1, np.array([2**31 + 1, 4]))),
)
dropout.errors(
    ErrorSample(sample((3, 4), 1.5), ValueError, r"in \[0, 1\], got 1.5"),
    ErrorSample(sample((3, 4), rng=_rng(2)), ShapeError, "rng has 2 samples"),
)
