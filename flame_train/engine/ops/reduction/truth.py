"""Whether some or all elements are true: not zero. NaN is true, as in PyTorch."""

from __future__ import annotations

from ...dtype import Array
from ...namespace import Namespace
from ...op import primitive, sample
from ...op_samples import booleans, integers, no_such_dim
from ..common.dims import Dims, axes


@primitive(torch="any", accepts_integers=True)
def any(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True where at least one element over dim is not zero; False over none"""
    return xp.any(input != 0, axis=axes(dim, input.ndim, "any"), keepdims=keepdim)


@primitive(torch="all", accepts_integers=True)
def all(xp: Namespace, input: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True where no element over dim is zero; True over none"""
    return xp.all(input != 0, axis=axes(dim, input.ndim, "all"), keepdims=keepdim)


for _op in (any, all):
    _op.non_differentiable("input")
    _op.samples(
        sample(booleans(3, 4)),
        sample(integers(2, 2, 3, 4), 1),
        sample(booleans(2, 3, 4), (0, 2), keepdim=True),
        sample((0, 3), 0),
        sample((3, 2)),
    )
    _op.errors(no_such_dim())
