"""Targets: where a formula leaves a gradient, so that nothing is added or joined in a pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..backend import same_place
from ..dtype import Array, as_array
from .graph import Edge, Node


@dataclass(frozen=True, slots=True)
class GradTarget:
    """Where the gradient of one argument goes.

    - `addend`: the gradient that has arrived there. A formula adds its own to it and returns the sum. None if nothing
      has arrived.
    - `buffer`: memory that the result may be written to: the addend's, if nobody else refers to it, or a view of a
      larger gradient. None if the formula must allocate.
    - `deferrable`: nobody reads the result before the pass is over, so that it may be computed on a side stream.
    """

    addend: Array | None = None
    buffer: Array | None = None
    deferrable: bool = False

    @property
    def overwrites(self) -> bool:
        """Whether the sum may be written over the addend."""
        return self.addend is not None and self.buffer is self.addend

    def total(self, g: Array) -> Array:
        """The sum of `g` and what has arrived."""
        return g if self.addend is None else self.addend + g


ALLOCATE = GradTarget()
"""The target of a gradient that is returned in new memory."""

GradTargets: TypeAlias = Mapping[str, Any]
"""By argument a `GradTarget`, or for a list of tensors a dict of them by index. Only gradients that are needed."""


class GradAccumulator:
    """The gradients that have arrived at a node, one slot an output.

    The first to arrive is borrowed, since others may refer to it. The sum with the second belongs to the accumulator,
    and later ones are added in place.
    """

    __slots__ = ("_owned", "values")

    def __init__(self, count: int) -> None:
        self.values: list[Array | None] = [None] * count
        self._owned = [False] * count

    def add(self, index: int, g: Array) -> None:
        """Adds one gradient."""
        pending = self.values[index]
        if pending is None:
            self.values[index] = g
        elif self._owned[index]:
            pending += g
        else:
            self.set(index, as_array(pending + g))

    def target(self, index: int) -> GradTarget | None:
        """Where a formula may add the next gradient itself; None if nothing has arrived."""
        value = self.values[index]
        return None if value is None else GradTarget(value, value if self._owned[index] else None)

    def set(self, index: int, total: Array) -> None:
        """Replaces what has arrived by its sum with a further gradient."""
        self.values[index] = total
        self._owned[index] = True


class _ViewBuffer:
    """Memory for the gradient of a tensor that views were taken of. Each view's part is lent once.

    The whole may itself be `borrowed`: where that tensor is a view of another, it is a part of the other's buffer.
    """

    __slots__ = ("borrowed", "lent", "parts", "whole")

    def __init__(self, whole: Array, parts: list[Array], borrowed: bool) -> None:
        self.whole, self.parts, self.borrowed = whole, parts, borrowed
        self.lent: set[int] = set()


class ViewBuffers:
    """Memory for the gradients of views, as parts of the gradient of the tensor that they are views of."""

    def __init__(self) -> None:
        self._buffers: dict[Node, _ViewBuffer] = {}

    def acquire(self, edge: Edge, is_free: Callable[[Edge], bool]) -> Array | None:
        """Memory for the gradient of a view, at the edge's end: a part of the viewed tensor's gradient.

        `is_free` says of an edge whether it ends inside the pass and no gradient has arrived there. None if the edge
        leads to no view, is not free, or the part has been lent already.
        """
        node = edge.node
        if node is None or node.split_views is None or not is_free(edge):
            return None
        if node not in self._buffers:
            whole = self.acquire(node.edges[0], is_free)
            borrowed = whole is not None
            if whole is None and len(node.outputs) > 1:
                whole = node.backend.empty(node.edges[0].shape, edge.dtype)
            if whole is None:
                return None
            self._buffers[node] = _ViewBuffer(whole, node.split_views(whole), borrowed)
        buffer = self._buffers[node]
        if edge.index in buffer.lent:
            return None
        buffer.lent.add(edge.index)
        part = buffer.parts[edge.index]
        if not node.backend.xp.may_share_memory(part, buffer.whole):  # a reshape that had to copy
            self.release(edge)
            return None
        return part

    def release(self, edge: Edge) -> None:
        """Takes back the memory for the gradient along an edge, because the formula did not use it."""
        assert edge.node is not None
        buffer = self._buffers[edge.node]
        buffer.lent.remove(edge.index)
        if not buffer.lent:
            del self._buffers[edge.node]
            if buffer.borrowed:
                self.release(edge.node.edges[0])

    def pop_whole(self, node: Node, grads: Sequence[Array | None]) -> Array | None:
        """The whole memory whose parts were lent for `grads`, if each of these lies in its part; else None."""
        buffer = self._buffers.pop(node, None)
        if buffer is None or not all(same_place(grads[i], buffer.parts[i]) for i in buffer.lent):
            return None
        return buffer.whole
