"""Which part of a graph leads to what `grad` is asked for: only that part runs, and only that is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .dtype import Array
from .graph import Edge, Node

if TYPE_CHECKING:
    from .tensor import Tensor

Targets = dict[tuple[int, int], Callable[[Array], None]]
"""Who wants the gradients of inner tensors, by (id of node, output index)."""


class Reach:
    """Says of edges and nodes whether they lead to one of `targets`, or to a leaf whose id is in `leaves`.

    A node that is a function to be run again may use tensors that none of its edges tells of. It counts as leading to
    all that is older than it.
    """

    def __init__(self, targets: Targets, lowest: int, leaves: frozenset[int]) -> None:
        self._targets, self._leaves = targets, leaves
        self._lowest = -1 if leaves else lowest  # nothing that is older than all targets leads to one
        self._known: dict[Node, bool] = {}

    def along(self, edge: Edge) -> bool:
        """Whether a gradient along `edge` is of use."""
        if edge.node is None:
            return id(edge.leaf) in self._leaves
        return (id(edge.node), edge.index) in self._targets or self.through(edge.node)

    def to(self, leaf: Tensor) -> bool:
        """Whether the gradient of `leaf` is asked for."""
        return id(leaf) in self._leaves

    def through(self, node: Node) -> bool:
        """Whether a gradient of one of the inputs of `node` is of use."""
        if node not in self._known:
            self._walk(node)
        return self._known[node]

    def _walk(self, start: Node) -> None:
        found, ahead = set(), [start]
        while ahead:
            node = ahead.pop()
            if node not in found and node not in self._known:
                found.add(node)
                ahead += [e.node for e in node.edges if e.node is not None and node.seq > self._lowest]
        for node in sorted(found, key=lambda n: n.seq):
            inside = node.seq > self._lowest
            self._known[node] = inside and (node.hides or any(self.along(e) for e in node.edges))
