"""ConvRot (arXiv 2512.03673): groups of columns are rotated before rows are rounded, so large ones cost others no bits.

With R, block-diagonal of the matrices of `io/convrot.py`, a weight W is stored as W R in int8. Then x W^T is
(x R) (W R)^T, and the gradient of x is what (W R) gives, times R. R is its own inverse.
"""

from __future__ import annotations

from typing import Final

from flame_train.io.convrot import hadamard, is_group

from ....errors import ShapeError
from ...dtype import Array, int8
from ...namespace import Namespace

GROUPS: Final = (16, 64, 256)
"""Columns that are rotated together, as kernels do it."""


def rotated(xp: Namespace, x: Array, group: int) -> Array:
    """Returns x (..., C) with each `group` of columns multiplied by its matrix; x itself for group 0."""
    if not group:
        return x
    matrix = xp.asarray(hadamard(group).astype(x.dtype))
    return xp.matmul(x.reshape(-1, group), matrix).reshape(x.shape)


def check_group(op: str, data: Array, group: int) -> None:
    """Raises ShapeError unless `group` is 0, or one that fits stored data, of int8."""
    if group and (data.dtype != int8 or not data.ndim or not is_group(group, data.shape[-1])):
        raise ShapeError(
            f"{op}: expected rotated to be 0, or for int8 a power of 4 that divides its columns, got {group} "
            f"for {tuple(data.shape)} of {data.dtype}"
        )


def unfit(group: int) -> str:
    """Says why kernels do not rotate by this group; "" if they do."""
    return "" if not group or group in GROUPS else f"groups of {group} columns"
