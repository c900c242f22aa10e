"""The graph: a node for each op that ran, with what it saved for its gradient and the edges its gradients go along.

Nodes point only to what they were computed from, so there are no cycles, and reference counting frees activations
as soon as the backward pass (`backprop.py`) is done with a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError
from .backend import Backend, same_place
from .dtype import Array, DType, as_array, compute_dtype, float32, float64
from .hooks import Hooks
from .rebuild import Recipe, arrays_in
from .writes import SEQUENCE, WRITES

if TYPE_CHECKING:
    from .backprop import Pass
    from .op import Formula, Op
    from .tensor import Tensor


_MANY = 1024  # from so many fp32 numbers on, NumPy's one-by-one summation is too inexact

Plus = dict[str, Any]
"""What a formula may add its gradients to, by argument: a `Held`, or a list of them where the argument is a list."""

Into = dict[str, Any]
"""Memory that a formula may write its gradients into, by argument: part of a larger gradient, which saves joining.

Where the argument is a list, a dict from the item's index to memory.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A gradient that has already arrived where another is about to be sent.

    `owned`: nobody else refers to the array, so it may be overwritten. `final`: nobody reads it until the pass is over.
    """

    array: Array
    owned: bool
    final: bool = False


class Edge:
    """Where the gradient of an op's input goes: to output `index` of another node, or to a leaf.

    `arg` is the input's name and `item` its index if that argument is a list. `shape` and `dtype` are the gradient's.
    """

    __slots__ = ("arg", "dtype", "index", "item", "leaf", "node", "shape")

    def __init__(
        self, arg: str, item: int | None, node: Node | None, index: int, leaf: Tensor | None,
        shape: tuple[int, ...], dtype: DType,
    ) -> None:  # fmt: skip
        self.arg, self.item, self.node, self.index, self.leaf = arg, item, node, index, leaf
        self.shape, self.dtype = shape, dtype

    @classmethod
    def to(cls, t: Tensor, arg: str = "", item: int | None = None) -> Edge:
        """The edge from argument `arg` to the node that computed `t`, or to `t` itself if it is a leaf."""
        if t._node is not None:
            return cls(arg, item, t._node, t._index, None, t.data.shape, t.data.dtype)
        leaf = t._leaf
        return cls(arg, item, None, 0, leaf, t.data.shape, leaf.data.dtype)


class Node:
    """One op that ran: its formulas, exactly the values they name, and the edges its gradients go along.

    `op` is None for the nodes that are no op: checkpoints and copies between devices. `outputs` are (shape, dtype).
    `parts` maps an array of the input's shape to views that correspond to the outputs; None unless the op has `views`.
    `hooks` are those of the output tensors, by index.
    """

    __slots__ = ("__weakref__", "backend", "edges", "formulas", "hooks", "op", "outputs", "parts", "saved", "seq")
    hides = False
    """True if gradients may also go to tensors that no edge leads to: a checkpointed function can use any tensor."""

    def __init__(
        self, op: Op | None, formulas: tuple[Formula, ...], saved: dict[str, Any] | None, edges: list[Edge],
        outputs: list[tuple[tuple[int, ...], DType]], backend: Backend,
        parts: Callable[[Array], list[Array]] | None = None,
    ) -> None:  # fmt: skip
        self.op, self.formulas, self.saved, self.edges = op, formulas, saved, edges
        self.outputs, self.backend, self.parts = outputs, backend, parts
        self.seq = next(SEQUENCE)
        self.hooks: dict[int, Hooks] = {}

    @property
    def name(self) -> str:
        return self.op.name if self.op else "checkpoint"

    @property
    def kept(self) -> list[Any]:
        """The arrays the node keeps alive for its backward pass, those in lists as lists."""
        return [_kept(value) for value in (self.saved or {}).values()]

    def forget(self) -> None:
        """Frees what was saved, and hooks, which will not be called again and may refer to the tensors they are of.

        The node itself lives as long as the result that was differentiated.
        """
        self.saved = None
        self.hooks.clear()

    def _check_kept(self) -> None:
        """Raises `RuntimeError` if what was saved has been freed, or has been written in place since."""
        if self.saved is None:
            raise RuntimeError(
                f"{self.name}: backward ran through this graph already and freed it; "
                "compute the result again, or pass retain_graph=True the first time"
            )
        if WRITES.last > self.seq and WRITES.since(self.seq, arrays_in(self.kept)):
            raise RuntimeError(
                f"{self.name}: a tensor that its gradient needs was written in place since; "
                "write it after backward, or write a clone()"
            )

    def apply(
        self, grads: list[Array | None], held: Callable[[Edge], Held | None], around: Pass
    ) -> tuple[list[Array | None], frozenset[int]]:
        """The gradients along `edges`, given those of the outputs, and the indices of edges where that is a total.

        A total includes what `held` said had arrived already. A checkpoint, which is a graph of its own, sends its
        gradients through the pass `around` it and returns None for each edge.
        """
        assert self.op is not None
        self._check_kept()
        g: Any = self._dense(grads) if self.op.multiple else grads[0]
        results: dict[str, Any] = {}
        plus = self._plus(held)
        into = self._into(plus, around)
        needs = around.needs(self)
        extra = {
            "needs": needs, "plus": plus, "into": into,
            "room": around.room(self, grads) if self.parts is not None else None,
        }  # fmt: skip
        for formula in self.formulas:
            if needs.isdisjoint(formula.args):
                continue
            found = self._run(formula, g, {n: extra[n] for n in formula.takes})
            results.update(zip(formula.args, found if len(formula.args) > 1 else (found,), strict=True))
        sent = [_of(results.get(e.arg), e.item) for e in self.edges]
        for e, found in zip(self.edges, sent, strict=True):
            room = into.get(e.arg) if e.item is None else into.get(e.arg, {}).get(e.item)
            if room is not None and not same_place(found, room):
                around.take_back(e)
        return sent, frozenset([i for i, e in enumerate(self.edges) if e.arg in plus] if plus else ())

    def _plus(self, held: Callable[[Edge], Held | None]) -> Plus:
        """The gradients that formulas with a `plus` may add theirs to; empty if two edges lead to the same place."""
        able = {a for f in self.formulas if "plus" in f.takes for a in f.args}
        edges = [e for e in self.edges if e.arg in able] if able else []
        if not edges or len({(id(e.node or e.leaf), e.index) for e in self.edges}) < len(self.edges):
            return {}
        found: dict[str, list[Held | None]] = {}
        for e in edges:
            found.setdefault(e.arg, []).append(held(e))
        lists = {e.arg for e in edges if e.item is not None}
        return {a: hs if a in lists else hs[0] for a, hs in found.items() if None not in hs}

    def _into(self, plus: Plus, around: Pass) -> Into:
        """The memory that formulas with an `into` may write their gradients to."""
        able = {a for f in self.formulas if "into" in f.takes for a in f.args}
        found: Into = {}
        for e in self.edges:
            room = around.lend(e) if e.arg in able and e.arg not in plus else None
            if room is not None and e.item is None:
                found[e.arg] = room
            elif room is not None:
                found.setdefault(e.arg, {})[e.item] = room
        return found

    def _dense(self, grads: list[Array | None]) -> Any:
        """The `g` of an op with several outputs: a tuple with zeros where no gradient arrived."""
        xp = self.backend.xp
        pairs = zip(grads, self.outputs, strict=True)
        return tuple(xp.zeros(shape, dtype) if g is None else g for g, (shape, dtype) in pairs)

    def _run(self, formula: Formula, g: Any, extra: dict[str, Any]) -> Any:
        """What a formula returns, in fp32 or fp64 for a reference, for gradients `g` of the outputs."""
        assert self.op is not None
        assert self.saved is not None
        values = [_rebuilt(self.saved[n]) for n in formula.names]
        if formula.impl != "reference":
            k = self.backend.kernels
            return formula.fn(k, k.fit(g), *values, **extra)
        if not self.op.moves:
            g = _raised(g)
            values = [_raised(v) for v in values]
        return formula.fn(self.backend.references, g, *values, **extra)


def _of(found: Any, item: int | None) -> Array | None:
    """An edge's gradient of those found for its argument: an item of them if that is a list; None if there are none."""
    return found if item is None or found is None else found[item]


def _rebuilt(value: Any) -> Any:
    """A saved value; recomputed if only how to make it was saved."""
    if isinstance(value, list):
        return [_rebuilt(v) for v in value]
    return value.make() if isinstance(value, Recipe) else value


def _kept(value: Any) -> Any:
    """The arrays a saved value keeps alive."""
    if isinstance(value, list):
        return [_kept(v) for v in value]
    return value.kept if isinstance(value, Recipe) else value


def _raised(value: Any) -> Any:
    """An array, or the arrays in a list, in the dtype that references compute in; anything else as it is."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        work = compute_dtype(dtype)
        return value if work == dtype else value.astype(work)
    if isinstance(value, (list, tuple)) and any(hasattr(v, "dtype") for v in value):
        return type(value)(_raised(v) for v in value)
    return value


def unbroadcast(xp: Any, g: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """`g` summed over the axes along which an input of `shape` was broadcast, in the input's dtype.

    Raises `ShapeError` if `shape` does not broadcast to that of `g`.
    """
    if g.shape != shape:
        work = compute_dtype(g.dtype)
        if g.ndim > len(shape):
            g = leading_sum(g, g.ndim - len(shape), work)
        axes = tuple(i for i, (n, m) in enumerate(zip(g.shape, shape, strict=True)) if n != m)
        if axes:
            g = added(xp.sum, g, axes, True, work)
        if g.shape != shape:
            raise ShapeError(f"a gradient of shape {g.shape} cannot be summed down to its input's {shape}")
    return xp.asarray(g, dtype) if g.dtype != dtype else as_array(g)


def leading_sum(x: Array, axes: int, dtype: DType) -> Array:
    """The sum over the first `axes` dims, in `dtype`.

    On a GPU many rows of few columns are summed in parts, and the parts then summed: CuPy gives each column's whole sum
    to one processor, which leaves the others idle.
    """
    if isinstance(x, np.ndarray):
        return added(np.sum, x, tuple(range(axes)), dtype=dtype)
    rows, columns = math.prod(x.shape[:axes]), math.prod(x.shape[axes:])
    parts = math.gcd(rows, 512)
    if rows < 4096 or columns > 4096 or parts == 1:
        return x.sum(axis=tuple(range(axes)), dtype=dtype)
    return x.reshape(parts, rows // parts, *x.shape[axes:]).sum(axis=1, dtype=dtype).sum(axis=0)


def added(fn: Callable[..., Array], x: Array, axes: tuple[int, ...], keepdims: bool = False,
          dtype: DType | None = None) -> Array:  # fmt: skip
    """`fn`, the namespace's sum or mean, of `x` over `axes`, in `dtype`.

    NumPy adds numbers pairwise only along the axis of the smallest stride. Along others it adds one by one, with an
    error that grows with their count, so long fp32 sums of that kind are taken in fp64 and rounded once.
    """
    result = dtype or x.dtype
    if not isinstance(x, np.ndarray) or result != float32 or math.prod([x.shape[a] for a in axes]) < _MANY:
        return fn(x, axis=axes, keepdims=keepdims, dtype=dtype)
    nearest = min((a for a in range(x.ndim) if x.shape[a] > 1), key=lambda a: abs(x.strides[a]))
    return as_array(fn(x, axis=axes, keepdims=keepdims, dtype=dtype if nearest in axes else float64)).astype(result)
