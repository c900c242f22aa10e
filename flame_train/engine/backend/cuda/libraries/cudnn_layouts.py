"""How arrays lie in memory, and how a convolution moves over them, as cuDNN's graphs are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....dtype import Array

Layout = tuple[list[int], list[int]]
"""An array's dims and strides, in elements."""

Size = tuple[int, int]
"""Height and width."""


class Steps(NamedTuple):
    """How a convolution's kernel moves over an image, in pixels down and across."""

    stride: Size
    padding: Size
    dilation: Size

    def lists(self) -> dict[str, list[int]]:
        """The same as cuDNN's graph takes it."""
        return {name: list(size) for name, size in self._asdict().items()}


def nhwc(x: Array) -> Layout:
    """An array (B, H, W, C) in cuDNN's order of dims, N C H W."""
    b, h, w, c = x.shape
    sb, sh, sw, sc = (s // x.itemsize for s in x.strides)
    return [b, c, h, w], [sb, sc, sh, sw]


def strided(x: Array) -> Layout:
    """An array's own dims and strides."""
    return list(x.shape), [s // x.itemsize for s in x.strides]


def sdpa_layouts(arrays: Mapping[str, Array], queries: Array) -> dict[str, Layout]:
    """By name. A bias, "b", has a row for each query, all at one place where it is the same for all."""
    layouts = {name: strided(x) for name, x in arrays.items()}
    if "b" in layouts:
        (b, h, rows, keys), strides = layouts["b"]
        of_batch, of_head, of_row = (s or keys for s in strides[:3])  # a dim of 1 may lie at any distance but none
        length = queries.shape[2]
        layouts["b"] = [b, h, length, keys], [of_batch, of_head, of_row if rows == length else 0, strides[3]]
    return layouts


def flat(*layouts: Layout) -> tuple[int, ...]:
    return tuple(n for dims, strides in layouts for n in (*dims, *strides))
