"""A plan of cuDNN's: its graph, where its tensors are bound, and what making one leaves behind."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

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
        """Returns the same as cuDNN's graph takes it."""
        return {name: list(size) for name, size in self._asdict().items()}


def nhwc(x: Array) -> Layout:
    """Returns an array (B, H, W, C) in cuDNN's order of dims, N C H W."""
    b, h, w, c = x.shape
    sb, sh, sw, sc = (s // x.itemsize for s in x.strides)
    return [b, c, h, w], [sb, sc, sh, sw]


def strided(x: Array) -> Layout:
    """Returns an array's own dims and strides."""
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


@contextmanager
def collected() -> Iterator[None]:
    """Frees at once what cuDNN's frontend leaves in reference cycles: exceptions that it keeps, and by way of their
    frames all arrays of whoever called.

    All of it is young, the collector being off meanwhile, so that only little is looked through.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


class Plan:
    """A graph, its tensors by name (objects or cuDNN's numbers for them), and the size of its workspace in bytes."""

    __slots__ = ("graph", "tensors", "workspace")

    def __init__(self, graph: Any, tensors: dict[str, Any]) -> None:
        self.graph, self.tensors, self.workspace = graph, tensors, 0

    def pointers(self, arrays: dict[str, Array]) -> dict[Any, int]:
        """Returns the addresses of `arrays`, given by name, as cuDNN's `execute` takes them."""
        return {self.tensors[n]: a.data.ptr for n, a in arrays.items()}

    def kept(self) -> bytes:
        """Returns the plan as it is written to disk: the tensors' numbers, a newline, and the serialised graph."""
        numbers = {name: tensor.get_uid() for name, tensor in self.tensors.items()}
        return json.dumps(numbers).encode() + b"\n" + bytes(self.graph.serialize())
