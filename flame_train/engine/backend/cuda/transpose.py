"""Copies to memory of another order, such as from NCHW to NHWC, by transpose.cuh.

A kernel that takes elements in the order of one side meets the other side's one by one, far apart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...dtype import Array
from .codegen.broadcast_plan import Shape, Strides, merged
from .nvrtc import ELEMENT_TYPES, KernelModules, begin, element_name

_LANES, _THREADS = 32, 256  # as in transpose.cuh
_LEAST = 16  # rows and columns: smaller ones leave most of a tile empty
_MOST_BLOCKS = 2**31 - 1

Outer = tuple[tuple[int, int, int], ...]
"""Of each outer dim its size and its strides in the source and in the target."""


class _Plan(NamedTuple):
    """Matrices of `rows`, along which the target has its neighbours, and `columns`, along which the source has them.

    Steps are in elements: of the source from row to row, of the target from column to column.
    """

    rows: int
    columns: int
    source_step: int
    target_step: int
    outer: Outer


class Transposes:
    """Launches these copies."""

    def __init__(self, modules: KernelModules) -> None:
        self._modules = modules

    def __call__(self, target: Array, source: Array) -> bool:
        """Copies `source` to `target` of the same shape and dtype, if both have neighbours, but not along one dim.

        Returns False, and does nothing, for other arrays.
        """
        if target.dtype not in ELEMENT_TYPES or target.dtype != source.dtype or target.shape != source.shape:
            return False
        item = target.itemsize
        plan = _plan(target.shape, _elements(target.strides, item), _elements(source.strides, item))
        if plan is None:
            return False
        pack = _pack(plan, item, source.data.ptr | target.data.ptr)
        down, across = (-(-n // (_LANES * pack)) for n in (plan.rows, plan.columns))
        dims = [*plan.outer, *((1, 0, 0),) * (3 - len(plan.outer))]
        blocks = down * across * dims[0][0] * dims[1][0] * dims[2][0]
        if blocks > _MOST_BLOCKS:
            return False
        numbers = [*map(np.int32, plan[:2]), *map(np.int64, plan[2:4]), np.int32(down), np.int32(across)]
        for size, from_, to in dims:
            numbers += [np.int32(size), np.int64(from_), np.int64(to)]
        del numbers[-3]  # what remains of a block's index is its place along the last dim
        known = f"typedef {element_name(target.dtype)} T;\nconstexpr int PACK = {pack};\n"
        text = f'{begin(target.itemsize == 2)}{known}#include "backend/cuda/transpose.cuh"\n'
        self._modules.generated(text, "transpose")((blocks,), (_THREADS,), (source, target, *numbers))
        return True


def _elements(strides: tuple[int, ...], item: int) -> Strides:
    return tuple(s // item for s in strides)


def _pack(plan: _Plan, item: int, addresses: int) -> int:
    """Elements that are moved at once: as many as four bytes have, if all that a tile begins with allows it."""
    lengths = [plan.rows, plan.columns, plan.source_step, plan.target_step, *(s for d in plan.outer for s in d[1:])]
    return 2 if item == 2 and not addresses % 4 and not any(n % 2 for n in lengths) else 1


@lru_cache(maxsize=4096)
def _plan(shape: Shape, target: Strides, source: Strides) -> _Plan | None:
    """How these lie to each other; None if their neighbours are along one dim, or a tile would be mostly empty."""
    dims = sorted((i for i, n in enumerate(shape) if n > 1), key=lambda i: -abs(target[i]))
    sizes, (to, from_) = merged([shape[i] for i in dims], [[s[i] for i in dims] for s in (target, source)])
    rows = to.index(1) if 1 in to else -1
    columns = from_.index(1) if 1 in from_ else -1
    if rows == columns or min(rows, columns) < 0 or min(sizes[rows], sizes[columns]) < _LEAST:
        return None
    outer = tuple((sizes[i], from_[i], to[i]) for i in range(len(sizes)) if i not in (rows, columns))
    if len(outer) > 3 or 0 in from_ or 0 in shape:
        return None
    return _Plan(sizes[rows], sizes[columns], from_[rows], to[columns], outer[::-1])
