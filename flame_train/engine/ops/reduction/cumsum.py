"""Running sums."""

from __future__ import annotations

from ...dtype import Array, float32, float64
from ...namespace import Namespace, is_numpy
from ...op import primitive, sample
from ...op_samples import no_such_dim
from ..common.dims import axis


@primitive(torch="cumsum", accepts_integers=True)
def cumsum(xp: Namespace, input: Array, dim: int) -> Array:
    """The sums of the first, the first two, the first three, ... along dim"""
    along = axis(dim, input.ndim, "cumsum")
    return _running(xp, xp.atleast_1d(input), along).reshape(input.shape)


def _running(xp: Namespace, x: Array, dim: int) -> Array:
    """Running sums along dim. For NumPy's, which add one by one, fp32 is summed in fp64, or errors would accumulate."""
    if is_numpy(xp) and x.dtype == float32:
        return xp.cumsum(x, axis=dim, dtype=float64).astype(float32)
    return xp.cumsum(x, axis=dim)


@cumsum.vjp("input")
def _(xp: Namespace, g: Array, dim: int) -> Array:
    if not g.ndim:
        return g
    return xp.flip(_running(xp, xp.flip(g, dim), dim), dim)


cumsum.errors(no_such_dim())


cumsum.samples(sample((3, 4), 0), sample((2, 3, 4), -2), sample((0, 3), 1), sample((), 0))
