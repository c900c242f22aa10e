"""Copies between devices as nodes of a graph: the gradient is copied back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .backend import Backend
from .dtype import Array
from .graph import Edge, Held, Node

if TYPE_CHECKING:
    from .backprop import Pass
    from .tensor import Tensor


class Moved(Node):
    """The node of a copy of `t` on another device, `there`. It saves nothing, so it may run any number of times."""

    __slots__ = ("_there",)

    def __init__(self, t: Tensor, there: Backend) -> None:
        super().__init__(None, (), {}, [Edge.to(t)], [(t.shape, t.dtype)], t.backend)
        self._there = there

    @property
    def name(self) -> str:
        return "to"

    def apply(
        self, grads: list[Array | None], held: Callable[[Edge], Held | None], around: Pass
    ) -> tuple[list[Array | None], frozenset[int]]:
        return [self.backend.put(self._there.get(grads[0]))], frozenset()
