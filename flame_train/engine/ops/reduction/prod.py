"""Products."""

from __future__ import annotations

from ...dtype import Array
from ...namespace import Namespace
from ...op import primitive, sample
from ...op_samples import no_such_dim
from ..common.dims import axes, spread


@primitive(torch="prod", accepts_integers=True)
def prod(xp: Namespace, input: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The product over dim, which is one dim or all; exact gradients where factors are zero"""
    return xp.prod(input, axis=axes(dim, input.ndim, "prod"), keepdims=keepdim)


@prod.vjp("input")
def _(xp: Namespace, g: Array, input: Array, dim: int | None, keepdim: bool) -> Array:
    dims = axes(dim, input.ndim, "prod")
    if not input.size:
        return xp.zeros_like(input)
    rows = input.reshape(1, -1) if dim is None else xp.moveaxis(input, dim, -1) if input.ndim else input.reshape(1, 1)
    one = xp.ones((*rows.shape[:-1], 1), rows.dtype)
    before = xp.cumprod(xp.concatenate([one, rows[..., :-1]], axis=-1), axis=-1)
    after = xp.flip(xp.cumprod(xp.concatenate([one, xp.flip(rows, -1)[..., :-1]], axis=-1), axis=-1), -1)
    others = before * after
    others = others.reshape(input.shape) if dim is None or not input.ndim else xp.moveaxis(others, -1, dim)
    return spread(xp, g, input.shape, dims, keepdim) * others


prod.errors(no_such_dim())


prod.samples(sample((2, 3)), sample((2, 3, 4), 1), sample((2, 3, 4), -1, keepdim=True), sample((), 0))
