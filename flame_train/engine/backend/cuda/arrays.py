"""Arrays in the memory layouts that kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...dtype import Array, DType
from .codegen.elementwise import Elementwise
from .nvrtc import ELEMENT_TYPES
from .transpose import Transposes

_COPIED = 8  # arrays that one launch copies


class Arrays:
    """Makes arrays, and others of the same values in another layout where theirs does not do."""

    xp: Any
    elementwise: Elementwise
    transposes: Transposes

    def empty(self, shape: Sequence[int], dtype: DType) -> Array:
        """Uninitialised memory."""
        return self.xp.empty(tuple(shape), dtype)

    def contiguous(self, x: Array) -> Array:
        """Returns `x` in row-major memory, itself if it is already."""
        return x if x.flags.c_contiguous else self.copied(x)

    def copied(self, x: Array) -> Array:
        """Returns a copy of `x` in row-major memory."""
        made = self.empty(x.shape, x.dtype)
        self.copy([made], [x])
        return made

    def cast(self, x: Array, dtype: DType) -> Array:
        """Returns `x` in another dtype; itself if it has that."""
        if x.dtype == dtype or x.dtype not in ELEMENT_TYPES or dtype not in ELEMENT_TYPES:
            return x.astype(dtype, copy=False)
        return self.elementwise(("input",), {"input": x}, (dtype,))[0]

    def framed(self, x: Array, shape: Sequence[int], places: Sequence[slice], value: float = 0.0) -> Array:
        """`x` at its places in a new array of `shape`, `value` around it. Slices have both ends and a step of 1."""
        made = self.empty(shape, x.dtype)
        self.copy([made[tuple(places)]], [x])
        for dim, (n, place) in enumerate(zip(shape, places, strict=True)):
            for side in (slice(0, place.start), slice(place.stop, n)):
                part = made[(*places[:dim], side)]
                if part.size:
                    self.elementwise(("value",), {"value": value}, (x.dtype,), part.shape, (part,))
        return made

    def aligned(self, value: Any) -> Any:
        """An argument in the form that every kernel can read: 16-byte aligned, without negative strides, vectors dense.

        A view that lies otherwise is copied. Arrays in lists and tuples are treated alike; other values are returned.
        """
        if isinstance(value, (list, tuple)):
            return type(value)([self.aligned(v) for v in value])
        if not isinstance(value, self.xp.ndarray):
            return value
        odd = value.data.ptr & 15 or min(value.strides, default=0) < 0
        return self.copied(value) if odd or (value.ndim == 1 and not value.flags.c_contiguous) else value

    def mergeable_rows(self, x: Array) -> Array:
        """`x` with equal distances between its rows, so that it reshapes to a matrix: itself, or a dense copy."""
        return x if has_mergeable_rows(x) else self.contiguous(x)

    def as_stacked_view(self, arrays: Sequence[Array]) -> Array | None:
        """Returns a view of the arrays along a new first dim; None unless they lie at equal distances in memory.

        The view holds the first one's memory alone, so the caller holds the others while it is used.
        """
        first = arrays[0]
        step = arrays[1].data.ptr - first.data.ptr if len(arrays) > 1 else first.nbytes
        for i, a in enumerate(arrays):
            if a.data.ptr != first.data.ptr + i * step or step <= 0:
                return None
            if (a.shape, a.strides, a.dtype) != (first.shape, first.strides, first.dtype):
                return None
        shape, strides = (len(arrays), *first.shape), (step, *first.strides)
        return self.xp.lib.stride_tricks.as_strided(first, shape, strides)

    def _plain(self, x: Array) -> Array:
        return x if is_plain(x) else self.contiguous(x)

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copies each source into its target. All targets have one shape and dtype, to which the sources broadcast.

        Our own kernels move packets where CuPy's moves elements. One copies several arrays in one launch, another one
        to memory of another order, tile by tile.
        """
        first = targets[0]
        if first.dtype not in ELEMENT_TYPES:
            for target, source in zip(targets, sources, strict=True):
                target[...] = source
            return
        if len(targets) == 1 and self.transposes(first, sources[0]):
            return
        for i in range(0, len(targets), _COPIED):
            given = {f"x{n}": x for n, x in enumerate(sources[i : i + _COPIED])}
            some = tuple(targets[i : i + _COPIED])
            self.elementwise(tuple(given), given, (first.dtype,) * len(some), first.shape, some)

    def stacked(self, arrays: Sequence[Array]) -> Array:
        """Returns the arrays along a new first dim: a view if they lie at equal distances in memory, else a copy."""
        found = self.as_stacked_view(arrays)
        if found is None:  # CuPy's stack reads addresses from the host, which no graph captures
            found = self.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
            self.copy(list(found), arrays)
        return found


def has_mergeable_rows(x: Array) -> bool:
    """Returns True if all dims but the last can be merged into one without a copy."""
    return all(x.shape[i] == 1 or x.strides[i] == x.shape[i + 1] * x.strides[i + 1] for i in range(x.ndim - 2))


def is_plain(x: Array) -> bool:
    """True if cuBLASLt can read `x` as it lies: unit stride along one of the last two dims, no overlap in the other."""
    return _plain(x.shape, x.strides, x.itemsize)


@lru_cache(maxsize=4096)
def _plain(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    rows, cols = shape[-2:]
    down, across = strides[-2] // item, strides[-1] // item
    by_rows = (across == 1 or cols == 1) and (down >= cols or rows == 1)
    by_cols = (down == 1 or rows == 1) and (across >= rows or cols == 1)
    return bool(by_rows or by_cols)
