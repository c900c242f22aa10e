"""Where attention finds and leaves arrays: so that merging heads copies nothing, and one product takes all three."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..dtype import Array
from ..graph import Into


def unit(k: Any, x: Array) -> Array:
    """`x` with its last dim dense, which is all that cuDNN asks of strides."""
    return x if x.strides[-1] == x.itemsize else k.rows_first(x)


def lies_in_packets(x: Array) -> bool:
    """Whether rows can be read and written 16 bytes at a time."""
    return x.strides[-1] == x.itemsize and not any(n % 16 for n in (x.data.ptr, *x.strides[:-1]))


def in_packets(k: Any, x: Array) -> Array:
    """`x` so that its rows can be read 16 bytes at a time."""
    return x if lies_in_packets(x) else k.rows_first(x)


def placed(arrays: Iterable[Array]) -> list[Any]:
    """Each array and the distances of its batches, heads and rows, in elements: what a kernel is given of it."""
    return [given for x in arrays for given in (x, *(np.int64(s // x.itemsize) for s in x.strides[:3]))]


def like_rows(k: Any, x: Array) -> Array:
    """Memory for (B, H, L, E) laid out as (B, L, H, E), so that merging the heads copies nothing."""
    b, h, length, e = x.shape
    return k.empty((b, length, h, e), x.dtype).transpose(0, 2, 1, 3)


def _rows_together(k: Any, *arrays: Array) -> list[Array]:
    """As `like_rows` for each; where all have one shape, a position's rows lie side by side, for one product."""
    if len({x.shape for x in arrays}) != 1:
        return [like_rows(k, x) for x in arrays]
    b, h, length, e = arrays[0].shape
    block = k.empty((b, length, len(arrays), h, e), arrays[0].dtype)
    return [block[:, :, i].transpose(0, 2, 1, 3) for i in range(len(arrays))]


def rooms(k: Any, query: Array, key: Array, value: Array, into: Into) -> list[Array]:
    """Where the gradients of the three go: to the places they have, if kernels can write there, or to memory made."""
    places = {n: into[n] for n in into if lies_in_packets(into[n])}
    rest = {n: x for n, x in (("query", query), ("key", key), ("value", value)) if n not in places}
    made = {**places, **dict(zip(rest, _rows_together(k, *rest.values()), strict=True))}
    return [made["query"], made["key"], made["value"]]
