"""Which part of a graph leads to the inputs of `grad`: only that part runs, and only that is freed."""

from __future__ import annotations

from collections.abc import Callable

from ..dtype import Array
from .graph import Edge, GraphTensor, Node

Listeners = dict[tuple[int, int], Callable[[Array], None]]
"""Called with the gradients of tensors that are no leaves, by (id of node, output index)."""


class GradPaths:
    """Tells whether edges and nodes lead to a tensor of `listeners`, or to a leaf whose id is in `leaves`.

    `oldest` is the smallest sequence number of the listeners' nodes. A checkpoint may use tensors that none of its
    edges leads to (`Node.opaque`), so it counts as leading to everything older than itself.
    """

    def __init__(self, listeners: Listeners, oldest: int, leaves: frozenset[int]) -> None:
        self._listeners, self._leaves = listeners, leaves
        self._oldest = -1 if leaves else oldest  # a node older than all listeners leads to none
        self._known: dict[Node, bool] = {}

    def along(self, edge: Edge) -> bool:
        """Tells whether the gradient along `edge` is needed."""
        if edge.node is None:
            return id(edge.leaf) in self._leaves
        return (id(edge.node), edge.index) in self._listeners or self.through(edge.node)

    def to(self, leaf: GraphTensor) -> bool:
        """Tells whether the gradient of `leaf` is requested."""
        return id(leaf) in self._leaves

    def through(self, node: Node) -> bool:
        """Tells whether the gradient of an input of `node` is needed."""
        if node not in self._known:
            self._walk(node)
        return self._known[node]

    def _walk(self, start: Node) -> None:
        """Decides for `start` and all nodes below it, oldest first; recursion would go as deep as the graph."""
        found, stack = set(), [start]
        while stack:
            node = stack.pop()
            if node not in found and node not in self._known:
                found.add(node)
                stack += [e.node for e in node.edges if e.node is not None and node.seq > self._oldest]
        for node in sorted(found, key=lambda n: n.seq):
            inside = node.seq > self._oldest
            self._known[node] = inside and (node.opaque or any(self.along(e) for e in node.edges))
