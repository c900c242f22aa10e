"""Queries or keys of several token streams, normalised and joined in one pass, for attention over all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ....errors import ShapeError
from ...autograd.grad_target import ALLOCATE, GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32, promote_floats
from ...op import ErrorSample, composite, sample
from ...tensors.tensor import Tensor
from ..common.dims import Shape, size_along
from ..common.row_kernels import shared, why_not_rows
from ..norm.rms_norm import UNROTATED, Angles, angle_rows, norm_gradients, norm_rows, rms_norm, rope
from ..shape.concat import cat

Maybe = Array | None


@composite(aux=("rstd",))
def cat_rms_norm(
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor],
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dim: int = -3,
    eps: float = 1e-6,
) -> Tensor:
    """rope(cat([rms_norm(x, weight) for each], dim), cos, sin): queries or keys of joint attention (arXiv 2403.03206)

    Each is normalised over its last dim with the weight of its stream; without cos and sin nothing is rotated. Their
    dtype may be wider than that of tensors and weights, which is the result's.

    Args:
        tensors: n of (..., L, ..., C).
        weights: n of (C,).
        cos, sin: angles that broadcast to the result, or None.
        dim: the dim along which they are joined.

    Returns:
        The joined tensor.

    Raises:
        ShapeError: lengths or shapes do not fit.
        ValueError: one of cos and sin alone.
    """
    if len(tensors) != len(weights):
        raise ShapeError(f"cat_rms_norm: {len(tensors)} tensors and {len(weights)} weights do not pair up")
    if (cos is None) != (sin is None):
        raise ValueError("cat_rms_norm: expected cos and sin, or neither")
    each = [
        rms_norm(x, (size_along(x.shape, -1, "cat_rms_norm"),), w, eps) for x, w in zip(tensors, weights, strict=True)
    ]
    normed: Tensor = cat(each, dim)
    return normed if cos is None else rope(normed, cos, sin).to(normed.dtype)


def _cat_rms_norm_errors() -> Iterator[ErrorSample]:
    pair = [(2, 3, 1, 4), (2, 5, 1, 4)]
    yield ErrorSample(sample(pair, [(4,)]), ShapeError, "2 tensors and 1 weights do not pair up")
    yield ErrorSample(sample([(), ()], [(4,), (4,)]), ShapeError, "cat_rms_norm: expected a tensor of at least 1 dim")
    yield ErrorSample(sample(pair, [(4,), (4,)], (8, 1, 4)), ValueError, "expected cos and sin, or neither")
    yield ErrorSample(sample([(2, 3, 1, 4), (1, 5, 1, 4)], [(4,), (4,)]), ShapeError, "equal but for dim -3")


cat_rms_norm.errors(*_cat_rms_norm_errors())


cat_rms_norm.samples(
    sample([(2, 3, 2, 4), (2, 5, 2, 4)], [(4,), (4,)], (8, 1, 4), (8, 1, 4)),
    sample([(2, 3, 2, 6), (2, 1, 2, 6)], [(6,), (6,)], dim=1, eps=1e-3),
    sample([(3, 2, 4)], [(4,)], (1, 4), (1, 4)),
)
cat_rms_norm.perf_samples(
    sample([(2, 77, 3, 64), (2, 300, 3, 64)], [(64,), (64,)]),
    sample([(1, 33, 4, 128), (1, 65, 4, 128)], [(128,), (128,)], (98, 1, 128), (98, 1, 128)),
    sample([(2, 33, 4, 128), (2, 65, 4, 128)], [(128,), (128,)], (98, 1, 128), (98, 1, 128)),
)


Index = tuple[Any, ...]


def _parts(tensors: Sequence[Array], dim: int) -> list[Index]:
    """Returns the index of each tensor in the joined one."""
    after, ends = tensors[0].ndim - dim % tensors[0].ndim - 1, itertools.accumulate(x.shape[dim] for x in tensors)
    tail = (slice(None),) * after
    return [(..., slice(end - x.shape[dim], end), *tail) for x, end in zip(tensors, ends, strict=True)]


def _part(x: Array, part: Index, size: int) -> Array:
    """Returns the rows of cosines or sines for one part, or all of them if they are the same along the joined dim."""
    dim = 1 - len(part)
    return x[part] if x.ndim >= -dim and x.shape[dim] == size > 1 else x


def _alike(tensors: Sequence[Array], weights: Sequence[Array], cos: Maybe, sin: Maybe, dim: int) -> str:
    first = tensors[0]
    if len(tensors) != len(weights) or (cos is None) != (sin is None) or not -first.ndim <= dim < first.ndim:
        return "arguments that the body refuses"
    if dim % first.ndim == first.ndim - 1 or (cos is not None and first.shape[-1] % 2):
        return "joined along their rows, or of an odd last dim"
    at = dim % first.ndim
    rest = {(*x.shape[:at], *x.shape[at + 1 :], x.dtype) for x in tensors}
    if len(rest) > 1 or len({w.dtype for w in weights}) > 1 or any(w.shape != first.shape[-1:] for w in weights):
        return "several shapes or dtypes"
    turned = [a for a in (cos, sin) if a is not None]
    size = sum(x.shape[dim] for x in tensors)
    for x, part in zip(tensors, _parts(tensors, dim), strict=True):
        if reason := why_not_rows(x, 1, *weights, *turned):
            return reason
        if any(shared(_part(a, part, size), x.shape) is None for a in turned):
            return "cos or sin broadcast in another way than by rows"
    return ""


def _angles(k: Launcher, cos: Maybe, sin: Maybe, part: Index, size: int, shape: Shape) -> Angles:
    if cos is None or sin is None:
        return UNROTATED
    return angle_rows(k, _part(cos, part, size), _part(sin, part, size), shape)


def _numbers(rstd: Array, tensors: Sequence[Array]) -> Iterator[Array]:
    """Yields each part's numbers, one for each row, out of `rstd`, which has them one part after another."""
    end = 0
    for x in tensors:
        end += math.prod(x.shape[:-1])
        yield rstd[end - math.prod(x.shape[:-1]) : end]


@cat_rms_norm.cuda("rows", when=_alike)
def _(
    k: Launcher, tensors: Sequence[Array], weights: Sequence[Array], cos: Maybe, sin: Maybe, dim: int, eps: float
) -> tuple[Array, Array]:
    shape = list(tensors[0].shape)
    shape[dim] = size = sum(x.shape[dim] for x in tensors)
    out = k.empty(shape, promote_floats([tensors[0].dtype, weights[0].dtype]))
    rstd = k.empty((math.prod(shape[:-1]),), float32)
    for x, w, part, numbers in zip(tensors, weights, _parts(tensors, dim), _numbers(rstd, tensors), strict=True):
        norm_rows(k, x, w, eps, _angles(k, cos, sin, part, size, x.shape), out=(out[part], numbers))
    return out, rstd


@cat_rms_norm.cuda_vjp("rows", "tensors", when=_alike)
def _(
    k: Launcher,
    g: Array,
    tensors: Sequence[Array],
    weights: Sequence[Array],
    cos: Maybe,
    sin: Maybe,
    rstd: Array,
    dim: int,
    targets: GradTargets,
) -> list[Array | None]:
    found = []
    parts = zip(tensors, weights, _parts(tensors, dim), _numbers(rstd, tensors), strict=True)
    for i, (x, w, part, numbers) in enumerate(parts):
        angles = _angles(k, cos, sin, part, g.shape[dim], x.shape)
        target = targets["tensors"].get(i, ALLOCATE)
        found.append(norm_gradients(k, g[part], x, w, numbers, angles, {"input": target})[0])
    return found
