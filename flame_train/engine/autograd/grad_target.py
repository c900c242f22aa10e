"""Targets, where a formula leaves a gradient so that nothing is added or joined in a pass of its own; running one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..backend import same_place
from ..dtype import Array, DType, as_array, compute_dtype, is_float
from ..op import VJP
from .graph import Edge, Node, Remat
from .versions import VERSIONS


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
        """Returns the sum of `g` and what has arrived."""
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
        """Returns where a formula may add the next gradient itself; None if nothing has arrived."""
        value = self.values[index]
        return None if value is None else GradTarget(value, value if self._owned[index] else None)

    def set(self, index: int, total: Array) -> None:
        """Replaces what has arrived by its sum with a further gradient."""
        self.values[index] = total
        self._owned[index] = True


class _ViewBuffer:
    """Memory for the gradient of a tensor with views, each part lent once; itself `borrowed` where that is a view."""

    __slots__ = ("borrowed", "lent", "parts", "whole")

    def __init__(self, whole: Array, parts: list[Array], borrowed: bool) -> None:
        self.whole, self.parts, self.borrowed = whole, parts, borrowed
        self.lent: set[int] = set()


class ViewBuffers:
    """Memory for the gradients of views, as parts of the gradient of the tensor that they are views of."""

    def __init__(self) -> None:
        self._buffers: dict[Node, _ViewBuffer] = {}

    def acquire(self, edge: Edge, is_free: Callable[[Edge], bool]) -> Array | None:
        """Returns memory for the gradient of a view, at the edge's end: a part of the viewed tensor's gradient.

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
        """Returns the whole memory whose parts were lent for `grads`, if each of these lies in its part; else None."""
        buffer = self._buffers.pop(node, None)
        if buffer is None or not all(same_place(grads[i], buffer.parts[i]) for i in buffer.lent):
            return None
        return buffer.whole


def check_saved(node: Node) -> None:
    """Raises `RuntimeError` if what a node saved has been freed, or has been written in place since."""
    if node.saved is None:
        raise RuntimeError(
            f"{node.name}: backward ran through this graph already and freed it; "
            "compute the result again, or pass retain_graph=True the first time"
        )
    if VERSIONS.last > node.seq and VERSIONS.written_since(node.seq, node.saved_arrays):
        raise RuntimeError(
            f"{node.name}: a tensor that its gradient needs was written in place since; "
            "write it after backward, or write a clone()"
        )


def dense_grads(node: Node, grads: list[Array | None]) -> tuple[Array, ...]:
    """Returns the `g` of an op with several outputs: a tuple with zeros where no gradient arrived.

    Those of whole numbers, such as the indices of `sort`, are one zero seen as many: nobody reads them.
    """
    xp = node.backend.xp

    def zeros(shape: tuple[int, ...], dtype: DType) -> Array:
        made: Array = xp.zeros(shape, dtype) if is_float(dtype) else xp.broadcast_to(xp.zeros((), dtype), shape)
        return made

    return tuple([zeros(*o) if g is None else g for g, o in zip(grads, node.outputs, strict=True)])


def by_argument(node: Node, by_edge: dict[int, GradTarget]) -> GradTargets:
    """Targets as formulas take them."""
    found: dict[str, Any] = {}
    for i, target in by_edge.items():
        e = node.edges[i]
        if e.item is None:
            found[e.arg] = target
        else:
            found.setdefault(e.arg, {})[e.item] = target
    return found


def call(node: Node, formula: VJP, g: Any, extras: dict[str, Any]) -> Any:
    """Returns what a formula returns for gradients `g` of the outputs; computed in fp32 or fp64 if it asks for that."""
    assert node.saved is not None
    values = [_materialized(node.saved[n]) for n in formula.names]
    given = {n: extras[n] for n in formula.takes}
    if formula.impl != "reference":
        k = node.backend.kernels
        return formula.fn(k, k.aligned(g), *values, **given)
    if formula.promotes:
        g, *values = (_promoted(v) for v in (g, *values))
    return formula.fn(node.backend.references, g, *values, **given)


def along_edge(found: Any, item: int | None) -> Array | None:
    """An edge's gradient of those found for its argument: an item of them if that is a list; None if there are none."""
    return found if item is None or found is None else found[item]


def _materialized(value: Any) -> Any:
    """Returns a saved value; recomputed if only how to make it was saved."""
    if isinstance(value, list):
        return [_materialized(v) for v in value]
    return value.materialize() if isinstance(value, Remat) else value


def _promoted(value: Any) -> Any:
    """Returns an array, or the arrays in a list, in the dtype that references compute in; anything else as it is."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        work = compute_dtype(dtype)
        return value if work == dtype else value.astype(work)
    if isinstance(value, (list, tuple)) and any(hasattr(v, "dtype") for v in value):
        return type(value)(_promoted(v) for v in value)
    return value
