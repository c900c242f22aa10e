"""How the operands of an elementwise kernel lie in memory: in as few dims as possible, and in packets of what width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
Strides = tuple[int, ...]
_INT32 = 2**31 - 2**16
_OFTEN = 4
"""How many times an element must be met, on the average, for its operand to be fetched an element at a time."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An array as the planner sees it: strides in elements, `offset` its address modulo 16, in bytes."""

    shape: Shape
    strides: Strides
    itemsize: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The merged dims `sizes` that all operands share, with the `strides` of each; `width` elements make a packet.

    Packets lie within rows, the innermost of `sizes`, unless `across`: then they go on from row to row. An operand
    that is not dense has its elements fetched one by one. `order` lists the dims of the full shape from the outermost
    in memory to the innermost, which is how a new output is laid out. `wide` says that indices need 64 bits.
    """

    order: tuple[int, ...]
    sizes: Shape
    strides: tuple[Strides, ...]
    width: int
    wide: bool
    across: bool = False


def plan(shape: Shape, operands: Sequence[Operand], new: int, itemsize: int, given: int = 0) -> Layout:
    """The layout for `operands` broadcast to `shape` and `new` outputs of `itemsize` bytes that are yet to be made.

    New outputs take the memory order of the first operand that is not broadcast, as NumPy's do. The last `given`
    operands are outputs that exist. If these are dense, and packets of all operands impossible, theirs still are.

    Args:
        shape: the results' shape.
        operands: the inputs, then the outputs that exist.
        new: how many outputs are to be made.
        itemsize: bytes of an element of theirs.
        given: how many outputs exist.

    Returns:
        The layout.
    """
    spread = [_spread(o, shape) for o in operands]
    order = _order(shape, spread)
    dense = _dense(shape, order)
    sizes, strides = merged([shape[i] for i in order], [[s[i] for i in order] for s in [*spread, *[dense] * new]])
    made = [*operands, *[Operand(shape, dense, itemsize)] * new]
    widths = _widths(made)
    width = next(w for w in widths if _fits(w, sizes, strides, made))
    extent = max(sum((n - 1) * abs(s) for n, s in zip(sizes, row, strict=True)) for row in strides)
    wide = max(extent, math.prod(shape)) > _INT32
    over = next(w for w in widths if _fits_across(w, sizes, strides, made))
    if over >= 4 * width and not wide:
        return Layout(order, sizes, strides, over, wide, across=True)
    gathering = _gathering(shape, operands, spread, given) if given and width == 1 and not wide else None
    return gathering or Layout(order, sizes, strides, width, wide)


def _gathering(shape: Shape, operands: Sequence[Operand], spread: Sequence[Strides], given: int) -> Layout | None:
    """Returns a layout in the order of the outputs, in packets of theirs; None unless they are dense and alike.

    Indices are divided once a packet, where a layout in the order of the inputs divides them for each element.
    """
    order = _order(shape, spread[-given:])
    sizes, strides = merged([shape[i] for i in order], [[s[i] for i in order] for s in spread])
    dense = dense_strides(sizes)
    if any(row != dense for row in strides[-given:]):
        return None
    whole = [o for o, row in zip(operands, strides, strict=True) if row == dense]
    width = next(w for w in _widths(operands) if w == 1 or not any(o.offset % min(16, o.itemsize * w) for o in whole))
    return Layout(order, sizes, strides, width, False, across=True) if width > 1 else None


def _widths(operands: Sequence[Operand]) -> tuple[int, ...]:
    """The widths that a packet may have, widest first: up to 16 bytes of the narrowest numbers, or of truth values."""
    if all(o.itemsize == 1 for o in operands):
        return 16, 8, 4, 2, 1
    return (8, 4, 2, 1) if any(o.itemsize == 2 for o in operands) else (4, 2, 1)


def dense_strides(sizes: Sequence[int]) -> Strides:
    """Returns the strides of row-major memory."""
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def _spread(o: Operand, shape: Shape) -> Strides:
    """Strides over the full shape: zero where the operand is broadcast."""
    lead = len(shape) - len(o.shape)
    own = [0 if n == 1 else s for n, s in zip(o.shape, o.strides, strict=True)]
    return (*[0] * lead, *own)


def _order(shape: Shape, spread: Sequence[Strides]) -> tuple[int, ...]:
    dims = range(len(shape))
    for strides in spread:
        if all(s or shape[i] == 1 for i, s in enumerate(strides)):
            return tuple(sorted(dims, key=lambda i: (-abs(strides[i]) if shape[i] > 1 else -math.inf, i)))
    return tuple(dims)


def _dense(shape: Shape, order: tuple[int, ...]) -> Strides:
    inner = dense_strides([shape[i] for i in order])
    return tuple(inner[order.index(i)] for i in range(len(shape)))


def merged(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[Shape, tuple[Strides, ...]]:
    """Sizes and strides with adjacent dims merged where all operands' strides allow it, and dims of size 1 dropped."""
    kept: list[int] = []
    rows: list[list[int]] = [[] for _ in strides]
    for i, n in enumerate(sizes):
        if n == 1:
            continue
        if kept and all(row[-1] == s[i] * n for row, s in zip(rows, strides, strict=True)):
            kept[-1] *= n
            for row, s in zip(rows, strides, strict=True):
                row[-1] = s[i]
        else:
            kept.append(n)
            for row, s in zip(rows, strides, strict=True):
                row.append(s[i])
    if not kept:
        return (1,), tuple((1,) for _ in strides)
    return tuple(kept), tuple(tuple(row) for row in rows)


def _fits(width: int, sizes: Shape, strides: Sequence[Strides], operands: Sequence[Operand]) -> bool:
    """Whether packets of `width` are contiguous and aligned in every operand. A single dim may have a remainder."""
    if width == 1:
        return True
    if len(sizes) > 1 and sizes[-1] % width:
        return False
    for row, o in zip(strides, operands, strict=True):
        if row[-1] not in (0, 1):
            return False
        if row[-1] == 1 and (any(s % width for s in row[:-1]) or o.offset % min(16, o.itemsize * width)):
            return False
    return True


def _fits_across(width: int, sizes: Shape, strides: Sequence[Strides], operands: Sequence[Operand]) -> bool:
    """Whether packets of `width` may go on from row to row: operands are dense and aligned, or small and broadcast.

    So outputs are dense, for no output is broadcast.
    """
    if width == 1:
        return True
    dense = dense_strides(sizes)
    for row, o in zip(strides, operands, strict=True):
        if row != dense and math.prod(n for n, s in zip(sizes, row, strict=True) if s) * _OFTEN > math.prod(sizes):
            return False
        if row == dense and o.offset % min(16, o.itemsize * width):
            return False
    return True
