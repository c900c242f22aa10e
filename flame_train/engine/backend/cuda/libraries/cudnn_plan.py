"""A plan of cuDNN's: its graph, where its tensors are bound, and what making one leaves behind."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....dtype import Array


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
        """The addresses of `arrays`, given by name, as cuDNN's `execute` takes them."""
        return {self.tensors[n]: a.data.ptr for n, a in arrays.items()}

    def kept(self) -> bytes:
        """The plan as it is written to disk: the tensors' numbers, a newline, and the serialised graph."""
        numbers = {name: tensor.get_uid() for name, tensor in self.tensors.items()}
        return json.dumps(numbers).encode() + b"\n" + bytes(self.graph.serialize())
