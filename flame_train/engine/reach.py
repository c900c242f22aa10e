"""Which part of a graph leads to the inputs `grad` was asked about: only that part runs, and only that is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .dtype import Array
from .graph import Edge, Node

if TYPE_CHECKING:
    from .tensor import Tensor

Targets = dict[tuple[int, int], Callable[[Array], None]]
"""Called with the gradients of tensors that are no leaves, by (id of node, output index)."""


class Reach:
    """Tells whether edges and nodes lead to one of `targets`, or to a leaf whose id is in `leaves`.

    `lowest` is the smallest sequence number of the targets' nodes. A checkpoint may use tensors that none of its edges
    leads to (`Node.hides`), so it counts as leading to everything older than itself.
    """

    def __init__(self, targets: Targets, lowest: int, leaves: frozenset[int]) -> None:
        self._targets, self._leaves = targets, leaves
        self._lowest = -1 if leaves else lowest  # a node older than all targets leads to none
        self._known: dict[Node, bool] = {}

    def along(self, edge: Edge) -> bool:
        """Whether somebody needs the gradient along `edge`."""
        if edge.node is None:
            return id(edge.leaf) in self._leaves
        return (id(edge.node), edge.index) in self._targets or self.through(edge.node)

    def to(self, leaf: Tensor) -> bool:
        """Whether the gradient of `leaf` is asked for."""
        return id(leaf) in self._leaves

    def through(self, node: Node) -> bool:
        """Whether somebody needs the gradient of an input of `node`."""
        if node not in self._known:
            self._walk(node)
        return self._known[node]

    def _walk(self, start: Node) -> None:
        """Decides for `start` and all nodes below it, oldest first; recursion would go as deep as the graph."""
        found, ahead = set(), [start]
        while ahead:
            node = ahead.pop()
            if node not in found and node not in self._known:
                found.add(node)
                ahead += [e.node for e in node.edges if e.node is not None and node.seq > self._lowest]
        for node in sorted(found, key=lambda n: n.seq):
            inside = node.seq > self._lowest
            self._known[node] = inside and (node.hides or any(self.along(e) for e in node.edges))
