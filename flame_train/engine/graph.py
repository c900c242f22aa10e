"""The graph and the backward pass.

Nodes point only to what they were computed from, so there are no cycles and activations are freed by
reference count as the backward pass goes by. Order is by sequence number: no recursion.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ShapeError, Unsupported
from .backend import Backend
from .dtype import Array, DType, compute_dtype, is_float
from .mode import mode
from .rebuild import Again

if TYPE_CHECKING:
    from .op import Formula, Op
    from .tensor import Tensor

_SEQUENCE = itertools.count()

Targets = dict[tuple[int, int], Callable[[Array], None]]

Plus = dict[str, Any]
"""What a formula may add its gradients to: a `Held` by argument, or a list of them where the argument is a list."""


@dataclass(frozen=True, slots=True)
class Held:
    """A gradient that has already arrived where another is about to be sent. An `owned` one may be written over."""

    array: Array
    owned: bool


class Sink(Protocol):
    """Where the gradients of leaves go."""

    def add(self, leaf: Tensor, g: Array) -> None:
        """One more contribution."""

    def held(self, leaf: Tensor) -> Held | None:
        """What the next contribution may be added to, by whoever makes it; None if it is to come by itself."""

    def put(self, leaf: Tensor, total: Array) -> None:
        """The sum of what was held and a further contribution."""


class Edge:
    """Where a gradient goes: to another node's output, or to a leaf."""

    __slots__ = ("arg", "dtype", "index", "item", "leaf", "node", "shape")

    def __init__(
        self, arg: str, item: int | None, node: Node | None, index: int, leaf: Tensor | None,
        shape: tuple[int, ...], dtype: DType,
    ) -> None:  # fmt: skip
        self.arg, self.item, self.node, self.index, self.leaf = arg, item, node, index, leaf
        self.shape, self.dtype = shape, dtype

    @classmethod
    def to(cls, t: Tensor, arg: str = "", item: int | None = None) -> Edge:
        """The edge that leads to `t`."""
        if t._node is not None:
            return cls(arg, item, t._node, t._index, None, t.shape, t.dtype)
        return cls(arg, item, None, 0, t._leaf, t.shape, t._leaf.dtype)


class Node:
    """One op that ran: its formulas, exactly what they name, and where its gradients go."""

    __slots__ = ("__weakref__", "backend", "edges", "formulas", "hooks", "op", "outputs", "saved", "seq")

    def __init__(
        self, op: Op | None, formulas: tuple[Formula, ...], saved: dict[str, Any] | None, edges: list[Edge],
        outputs: list[tuple[tuple[int, ...], DType]], backend: Backend,
    ) -> None:  # fmt: skip
        self.op, self.formulas, self.saved, self.edges = op, formulas, saved, edges
        self.outputs, self.backend = outputs, backend
        self.seq = next(_SEQUENCE)
        self.hooks: dict[int, list[Callable[[Tensor], Tensor | None]]] = {}

    @property
    def name(self) -> str:
        return self.op.name if self.op else "checkpoint"

    @property
    def kept(self) -> list[Any]:
        """What the node holds on to for its backward pass."""
        return [_kept(value) for value in (self.saved or {}).values()]

    def apply(
        self, grads: list[Array | None], held: Callable[[Edge], Held | None], around: Pass
    ) -> tuple[list[Array | None], frozenset[int]]:
        """The gradients along `edges`, given those of the outputs; and the edges whose gradient is a sum with `held`.

        A node that is a graph of its own sends them through the pass `around` it, and returns none.
        """
        assert self.op is not None
        if self.saved is None:
            raise RuntimeError(
                f"{self.name}: backward ran through this graph already and freed it; "
                "compute the result again, or pass retain_graph=True the first time"
            )
        g: Any = self._dense(grads)
        results: dict[str, Any] = {}
        needs = frozenset(e.arg for e in self.edges)
        plus = self._plus(held)
        for formula in self.formulas:
            found = self._run(formula, g, needs, plus)
            results.update(zip(formula.args, found if len(formula.args) > 1 else (found,), strict=True))
        sent = [results[e.arg] if e.item is None else results[e.arg][e.item] for e in self.edges]
        return sent, frozenset(i for i, e in enumerate(self.edges) if e.arg in plus)

    def _plus(self, held: Callable[[Edge], Held | None]) -> Plus:
        """What the formulas that can add their gradients to others may add them to."""
        able = {a for f in self.formulas if f.takes_plus for a in f.args}
        edges = [e for e in self.edges if e.arg in able]
        if not edges or len({(id(e.node or e.leaf), e.index) for e in self.edges}) < len(self.edges):
            return {}  # two of them meet
        found: dict[str, list[Held | None]] = {}
        for e in edges:
            found.setdefault(e.arg, []).append(held(e))
        lists = {e.arg for e in edges if e.item is not None}
        return {a: hs if a in lists else hs[0] for a, hs in found.items() if None not in hs}

    def _dense(self, grads: list[Array | None]) -> Any:
        """The op's `g`: the gradient, or for several outputs a tuple with zeros where none arrived."""
        assert self.op is not None
        if not self.op.multiple:
            return grads[0]
        xp = self.backend.xp
        pairs = zip(grads, self.outputs, strict=True)
        return tuple(xp.zeros(shape, dtype) if g is None else g for g, (shape, dtype) in pairs)

    def _run(self, formula: Formula, g: Any, needs: frozenset[str], plus: Plus) -> Any:
        assert self.op is not None
        assert self.saved is not None
        values = [_remade(self.saved[n]) for n in formula.names]
        extra: dict[str, Any] = {"needs": needs} if formula.takes_needs else {}
        if formula.takes_plus:
            extra["plus"] = plus
        if formula.impl != "reference":
            return formula.fn(self.backend.kernels, g, *values, **extra)
        if not self.op.moves:
            g = _raised(g)
            values = [_raised(v) for v in values]
        return formula.fn(self.backend.references, g, *values, **extra)


def _remade(value: Any) -> Any:
    """What was saved, with what is made again in the place of how it is made."""
    if isinstance(value, list):
        return [_remade(v) for v in value]
    return value.make() if isinstance(value, Again) else value


def _kept(value: Any) -> Any:
    if isinstance(value, list):
        return [_kept(v) for v in value]
    return value.kept if isinstance(value, Again) else value


def _raised(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and any(hasattr(v, "dtype") for v in value):
        return type(value)(_raised(v) for v in value)
    if hasattr(value, "dtype") and is_float(value.dtype) and compute_dtype(value.dtype) != value.dtype:
        return value.astype(compute_dtype(value.dtype))
    return value


def unbroadcast(xp: Any, g: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """`g` summed over the axes along which an input of `shape` was broadcast, in the input's dtype."""
    if g.shape != shape:
        work = compute_dtype(g.dtype)
        if g.ndim > len(shape):
            g = leading_sum(g, g.ndim - len(shape), work)
        axes = tuple(i for i, (n, m) in enumerate(zip(g.shape, shape, strict=True)) if n != m)
        if axes:
            g = g.sum(axis=axes, keepdims=True, dtype=work)
        if g.shape != shape:
            raise ShapeError(f"a gradient of shape {g.shape} cannot be summed down to its input's {shape}")
    return xp.asarray(g, dtype) if g.dtype != dtype else g


def leading_sum(x: Array, axes: int, dtype: DType) -> Array:
    """The sum over the first `axes` dims, in `dtype`.

    Many rows of few columns are summed in parts and the parts then: CuPy gives each column's whole sum to one
    processor of the GPU.
    """
    rows, columns = math.prod(x.shape[:axes]), math.prod(x.shape[axes:])
    parts = math.gcd(rows, 512)
    if rows < 4096 or columns > 4096 or parts == 1:
        return x.sum(axis=tuple(range(axes)), dtype=dtype)
    return x.reshape(parts, rows // parts, *x.shape[axes:]).sum(axis=1, dtype=dtype).sum(axis=0)


class _Sums:
    """Gradients on their way, one slot an output. The first is borrowed, later ones are added."""

    __slots__ = ("owned", "values")

    def __init__(self, count: int) -> None:
        self.values: list[Array | None] = [None] * count
        self.owned = [False] * count

    def add(self, index: int, g: Array) -> None:
        held = self.values[index]
        if held is None:
            self.values[index] = g
        elif self.owned[index]:
            held += g
        else:
            self.put(index, held + g)

    def held(self, index: int) -> Held | None:
        value = self.values[index]
        return None if value is None else Held(value, self.owned[index])

    def put(self, index: int, total: Array) -> None:
        self.values[index] = total
        self.owned[index] = True


class Pass:
    """One pass backward over a graph; for a recomputed node inside it, the sink.

    A `nested` pass, inside such a node, hands every contribution to a leaf on as it comes: the pass around it, which
    alone knows the whole gradient, adds them up in the order of a run without recomputation, and calls the hooks.
    `targets` receives the gradients of inner tensors by (id of node, output index).
    """

    def __init__(self, sink: Sink, *, nested: bool = False, targets: Targets | None = None) -> None:
        self._sink, self._nested, self._targets = sink, nested, targets
        self._pending: dict[Node, _Sums] = {}
        self._heap: list[tuple[int, Node]] = []
        self._leaves: dict[int, tuple[Tensor, _Sums]] = {}

    def run(self, roots: Sequence[tuple[Tensor, Array]], *, retain_graph: bool = False) -> None:
        """Carries gradients from `roots` to the leaves, each handed to the sink once."""
        for t, g in roots:
            self.send(Edge.to(t), g)
        while self._heap:
            node = heapq.heappop(self._heap)[1]
            grads = _through_hooks(node, self._pending.pop(node).values, self._targets)
            sent, sums = _observe(node, grads, self.held_at, self)
            for i, (edge, g) in enumerate(zip(node.edges, sent, strict=True)):
                if g is not None:
                    whole = unbroadcast(node.backend.xp, g, edge.shape, edge.dtype)
                    (self.put_at if i in sums else self.send)(edge, whole)
            if not retain_graph:
                node.saved = None
            del grads, sent
        for leaf, held in self._leaves.values():
            g = held.values[0]
            for hook in leaf._hooks or ():
                g = _hooked(hook, g)
            self._sink.add(leaf, g)

    # ---- along edges -------------------------------------------------------------------------------

    def send(self, edge: Edge, g: Array) -> None:
        """One more contribution along an edge."""
        if edge.node is not None:
            if edge.node not in self._pending:
                self._pending[edge.node] = _Sums(len(edge.node.outputs))
                heapq.heappush(self._heap, (-edge.node.seq, edge.node))
            self._pending[edge.node].add(edge.index, g)
        elif edge.leaf is not None:
            self.add(edge.leaf, g)

    def held_at(self, edge: Edge) -> Held | None:
        """What has arrived at an edge's end."""
        if edge.node is not None:
            found = self._pending.get(edge.node)
            return found.held(edge.index) if found else None
        return self.held(edge.leaf) if edge.leaf is not None else None

    def put_at(self, edge: Edge, total: Array) -> None:
        """The sum of what had arrived and a further contribution."""
        if edge.node is not None:
            self._pending[edge.node].put(edge.index, total)
        elif edge.leaf is not None:
            self.put(edge.leaf, total)

    # ---- to leaves ---------------------------------------------------------------------------------

    def add(self, leaf: Tensor, g: Array) -> None:
        if self._nested:
            self._sink.add(leaf, g)
        else:
            self._leaves.setdefault(id(leaf), (leaf, _Sums(1)))[1].add(0, g)

    def held(self, leaf: Tensor) -> Held | None:
        if id(leaf) in self._leaves:
            return self._leaves[id(leaf)][1].held(0)
        return None if leaf._hooks else self._sink.held(leaf)

    def put(self, leaf: Tensor, total: Array) -> None:
        if id(leaf) in self._leaves:
            self._leaves[id(leaf)][1].put(0, total)
        else:
            self._sink.put(leaf, total)


def _observe(
    node: Node, grads: list[Array | None], held: Callable[[Edge], Held | None], around: Pass
) -> tuple[list[Array | None], frozenset[int]]:
    hooks = mode().hooks
    for h in hooks:
        h.before(node.name, "backward")
    result, sums = node.apply(grads, held, around)
    for h in hooks:
        h.after(node.name, "backward", [g for g in result if g is not None])
    return result, sums


def _through_hooks(node: Node, grads: list[Array | None], targets: Targets | None) -> list[Array | None]:
    for index, hooks in node.hooks.items():
        for hook in hooks:
            if grads[index] is not None:
                grads[index] = _hooked(hook, grads[index])
    if targets:
        for index, g in enumerate(grads):
            if g is not None and (id(node), index) in targets:
                targets[id(node), index](g)
    return grads


def _hooked(hook: Callable[[Tensor], Tensor | None], g: Array) -> Array:
    from .tensor import Tensor

    replaced = hook(Tensor(g))
    if replaced is None:
        return g
    if replaced.shape != g.shape:
        raise ShapeError(f"a hook returned a gradient of shape {replaced.shape} for a tensor of shape {g.shape}")
    return replaced.data


def backward(
    outputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool = False,
) -> None:
    """Accumulates d outputs / d leaf into the `.grad` of every leaf, as torch.autograd.backward."""
    Pass(_Accumulating()).run(_roots(outputs, grad_outputs), retain_graph=retain_graph)


class _Accumulating:
    """Adds to the leaves' `.grad`."""

    def add(self, leaf: Tensor, g: Array) -> None:
        leaf._accumulate(g)

    def held(self, leaf: Tensor) -> Held | None:
        return None if leaf.grad is None else Held(leaf.grad.data, owned=True)

    def put(self, leaf: Tensor, total: Array) -> None:
        assert leaf.grad is not None
        if total is not leaf.grad.data:
            leaf.grad.data[...] = total


class _Collecting:
    """Keeps the gradients of some leaves, each by the tensor's id."""

    def __init__(self, wanted: set[int], found: dict[int, Array]) -> None:
        self._wanted, self._found = wanted, found

    def add(self, leaf: Tensor, g: Array) -> None:
        if id(leaf) in self._wanted:
            self._found[id(leaf)] = g

    def held(self, leaf: Tensor) -> Held | None:
        return None

    def put(self, leaf: Tensor, total: Array) -> None:
        raise AssertionError("nothing is held here")


def grad(
    outputs: Tensor | Sequence[Tensor], inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None, *, retain_graph: bool = False,
    create_graph: bool = False, allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the sum of `outputs` with respect to `inputs`; no `.grad` is touched.

    As torch.autograd.grad. Raises `Unsupported` for `create_graph`: the engine differentiates once.
    """
    from .tensor import Tensor

    if create_graph:
        raise Unsupported("grad: create_graph=True asks for second-order gradients; the engine is first order only")
    outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ins = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    found: dict[int, Array] = {}
    targets: Targets = {(id(t._node), t._index): partial(found.__setitem__, id(t)) for t in ins if t._node is not None}
    sink = _Collecting({id(t) for t in ins}, found)
    Pass(sink, targets=targets).run(_roots(outs, given), retain_graph=retain_graph)
    missing = [i for i, t in enumerate(ins) if id(t) not in found]
    if missing and not allow_unused:
        raise RuntimeError(
            f"grad: input {missing[0]} was not used to compute the outputs; allow_unused=True gives None"
        )
    return tuple(Tensor(found[id(t)]) if id(t) in found else None for t in ins)


def _roots(outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None] | None) -> list[tuple[Tensor, Array]]:
    roots = []
    for i, t in enumerate(outputs):
        if not t.requires_grad:
            raise RuntimeError("backward: this tensor does not require grad; nothing it was computed from does")
        g = grad_outputs[i] if grad_outputs is not None else None
        if g is None:
            if t.size != 1:
                raise RuntimeError(
                    f"backward: a gradient must be given for a tensor of shape {t.shape}, only scalars need none"
                )
            roots.append((t, t.backend.xp.ones(t.shape, t.dtype)))
        elif g.shape != t.shape:
            raise ShapeError(f"backward: expected a gradient of shape {t.shape}, got {g.shape}")
        else:
            roots.append((t, g.data))
    return roots
