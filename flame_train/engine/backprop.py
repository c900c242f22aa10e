"""The backward pass: gradients carried from roots to leaves, node by node, newest first (by `Node.seq`)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import ShapeError, Unsupported, kind_of
from .backend import same_place
from .dtype import Array, as_array
from .graph import Edge, Held, Node, unbroadcast
from .hooks import through
from .mode import mode
from .reach import Reach, Targets

if TYPE_CHECKING:
    from .tensor import Tensor


class Sink(Protocol):
    """Where the gradients of leaves go.

    A formula may add its contribution itself, in the same kernel that computes it: then `held` gives it what is there
    and `put` takes the total. Otherwise `add` takes the contribution alone.
    """

    def add(self, leaf: Tensor, g: Array) -> None:
        """Adds one contribution."""

    def held(self, leaf: Tensor) -> Held | None:
        """What a formula may add the next contribution to; None if it must hand that to `add`."""

    def put(self, leaf: Tensor, total: Array) -> None:
        """Takes the sum of what was held and a further contribution."""


class _Sums:
    """The gradients that have arrived at a node, one slot an output.

    The first to arrive is borrowed, since others may refer to it. The sum with the second is `owned`, and later ones
    are added in place.
    """

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
            self.put(index, as_array(held + g))

    def held(self, index: int) -> Held | None:
        value = self.values[index]
        return None if value is None else Held(value, self.owned[index])

    def put(self, index: int, total: Array) -> None:
        self.values[index] = total
        self.owned[index] = True


class _Room:
    """Memory for the gradient of a tensor that views were taken of. Each view's part is lent once.

    The whole may itself be `borrowed`: where that tensor is a view of another, it is a part of the other's room.
    """

    __slots__ = ("borrowed", "lent", "parts", "whole")

    def __init__(self, whole: Array, parts: list[Array], borrowed: bool) -> None:
        self.whole, self.parts, self.borrowed = whole, parts, borrowed
        self.lent: set[int] = set()


class Pass:
    """One pass backward over a graph. It is also the `Sink` of the passes inside the checkpoints that it meets.

    A pass inside a checkpoint has the pass `around` it, and hands every contribution to a leaf on as it comes. The
    outermost pass alone knows the whole gradient: it adds the contributions up, in the order of a run without
    checkpoints, and calls the hooks. Contributions to nodes older than `since`, the first number of the recomputed
    graph, are handed on too: they belong to tensors that the function used without taking them as arguments.

    `targets` receives the gradients of tensors that are no leaves. `reach` restricts the pass to what leads to them or
    to the leaves that were asked for; without it all leaves get theirs.
    """

    def __init__(
        self, sink: Sink, *, around: Pass | None = None, since: int = 0, targets: Targets | None = None,
        reach: Reach | None = None,
    ) -> None:  # fmt: skip
        self._sink, self._around, self._since = sink, around, since
        self._targets, self._reach = targets, reach
        self._pending: dict[Node, _Sums] = {}
        self._heap: list[tuple[int, Node]] = []
        self._leaves: dict[int, tuple[Tensor, _Sums]] = {}
        self._rooms: dict[Node, _Room] = {}

    @np.errstate(all="ignore")
    def run(self, roots: Sequence[tuple[Tensor, Array]], *, retain_graph: bool = False) -> None:
        """Carries gradients from `roots` to the leaves; each leaf's is handed to the sink once.

        Frees what nodes saved unless `retain_graph`. Raises `RuntimeError` where that is freed or overwritten.
        """
        for t, g in roots:
            self.send(Edge.to(t), g)
        while self._heap:
            node = heapq.heappop(self._heap)[1]
            grads = _through_hooks(node, self._pending.pop(node).values, self._targets)
            if self._reach is not None and not self._reach.through(node):
                continue
            sent, sums = _observe(node, grads, self.held_at, self)
            for i, (edge, g) in enumerate(zip(node.edges, sent, strict=True)):
                if g is not None:
                    whole = unbroadcast(node.backend.xp, g, edge.shape, edge.dtype)
                    (self.put_at if i in sums else self.send)(edge, whole)
            if not retain_graph:
                node.forget()
            del grads, sent
        if self._around is None:
            for t, _ in roots:
                t.backend.join()
        for leaf, held in self._leaves.values():
            g = held.values[0]
            self._sink.add(leaf, through(leaf._hooks, g) if leaf._hooks else g)

    def needs(self, node: Node) -> frozenset[str]:
        """The arguments of `node` whose gradients somebody needs."""
        return frozenset([e.arg for e in node.edges if self._reach is None or self._reach.along(e)])

    # ---- along edges -------------------------------------------------------------------------------

    def send(self, edge: Edge, g: Array) -> None:
        """One more contribution along an edge."""
        if self._reach is not None and not self._reach.along(edge):
            return
        outside = self._outside(edge)
        if outside is not None:
            outside.send(edge, g)
        elif edge.node is not None:
            sums = self._pending.get(edge.node)
            if sums is None:
                sums = self._pending[edge.node] = _Sums(len(edge.node.outputs))
                heapq.heappush(self._heap, (-edge.node.seq, edge.node))
            sums.add(edge.index, g)
        elif edge.leaf is not None:
            self.add(edge.leaf, g)

    def _outside(self, edge: Edge) -> Pass | None:
        """The pass around this one if an edge leads out of the recomputed graph, else None."""
        return self._around if edge.node is not None and edge.node.seq < self._since else None

    def held_at(self, edge: Edge) -> Held | None:
        """What has arrived at an edge's end and may be added to; None if nothing."""
        outside = self._outside(edge)
        if outside is not None:
            return outside.held_at(edge)
        if edge.node is not None:
            found = self._pending.get(edge.node)
            return found.held(edge.index) if found else None
        return self.held(edge.leaf) if edge.leaf is not None else None

    def put_at(self, edge: Edge, total: Array) -> None:
        """Replaces what had arrived at an edge's end by its sum with a further contribution."""
        outside = self._outside(edge)
        if outside is not None:
            outside.put_at(edge, total)
        elif edge.node is not None:
            self._pending[edge.node].put(edge.index, total)
        elif edge.leaf is not None:
            self.put(edge.leaf, total)

    # ---- memory for the gradients of views ---------------------------------------------------------

    def lend(self, edge: Edge) -> Array | None:
        """Memory for the gradient along an edge: its part of the gradient of what the edge's end took views of.

        None if the edge leads to no such node, or something has arrived there or been lent already.
        """
        node = edge.node
        if node is None or node.parts is None or self._outside(edge) or self.held_at(edge) is not None:
            return None
        if node not in self._rooms:
            whole = self.lend(node.edges[0])
            borrowed = whole is not None
            if whole is None and len(node.outputs) > 1:
                whole = node.backend.empty(node.edges[0].shape, edge.dtype)
            if whole is None:
                return None
            self._rooms[node] = _Room(whole, node.parts(whole), borrowed)
        room = self._rooms[node]
        if edge.index in room.lent:
            return None
        room.lent.add(edge.index)
        part = room.parts[edge.index]
        if not node.backend.xp.may_share_memory(part, room.whole):  # a reshape that had to copy
            self.take_back(edge)
            return None
        return part

    def take_back(self, edge: Edge) -> None:
        """Notes that the memory lent for the gradient along an edge was not used."""
        assert edge.node is not None
        room = self._rooms[edge.node]
        room.lent.remove(edge.index)
        if not room.lent:
            del self._rooms[edge.node]
            if room.borrowed:
                self.take_back(edge.node.edges[0])

    def room(self, node: Node, grads: Sequence[Array | None]) -> Array | None:
        """The whole memory whose parts were lent for `grads`, if each of these lies in its part; else None."""
        room = self._rooms.pop(node, None)
        if room is None or not all(same_place(grads[i], room.parts[i]) for i in room.lent):
            return None
        return room.whole

    # ---- to leaves ---------------------------------------------------------------------------------

    def add(self, leaf: Tensor, g: Array) -> None:
        if self._around is not None:
            self._sink.add(leaf, g)
        elif self._reach is None or self._reach.to(leaf):
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
    """`node.apply`, with the mode's hooks called before and after."""
    hooks = mode().hooks
    for h in hooks:
        h.before(node.name, "backward", [g for g in grads if g is not None])
    result, sums = node.apply(grads, held, around)
    for h in hooks:
        h.after(node.name, "backward", [g for g in result if g is not None])
    return result, sums


def _through_hooks(node: Node, grads: list[Array | None], targets: Targets | None) -> list[Array | None]:
    """A node's complete gradients as its tensors' hooks leave them, which `targets` are then told."""
    for index, hooks in node.hooks.items():
        if hooks and grads[index] is not None:
            grads[index] = through(hooks, grads[index])
    if targets:
        for index, g in enumerate(grads):
            if g is not None and (id(node), index) in targets:
                targets[id(node), index](g)
    return grads


def backward(
    outputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool = False,
) -> None:
    """Accumulates d outputs / d leaf into the `.grad` of every leaf, as torch.autograd.backward.

    `grad_outputs` holds a gradient of its output's shape for each output; None stands for 1 at a scalar.

    Raises `RuntimeError` for an output that does not require grad, a missing gradient of one that is no scalar, and a
    graph that is freed or whose tensors were written in place; `TypeError`, `ValueError` or `ShapeError` for arguments
    of another kind, number or shape.
    """
    Pass(_Accumulating()).run(_roots(outputs, grad_outputs), retain_graph=retain_graph)


class _Accumulating:
    """Adds to the leaves' `.grad`, but for those that were frozen since they were used."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def add(self, leaf: Tensor, g: Array) -> None:
        if leaf.requires_grad:
            leaf._accumulate(g)

    def held(self, leaf: Tensor) -> Held | None:
        if leaf.grad is None or not leaf.requires_grad:
            return None
        if id(leaf) in self._told:  # a second contribution is added to the first, which must be there
            leaf.backend.join()
        self._told.add(id(leaf))
        as_it_comes = leaf.grad.dtype == leaf.dtype  # else what is sent is read, to be converted
        return Held(leaf.grad.data, owned=True, final=as_it_comes and not mode().hooks)

    def put(self, leaf: Tensor, total: Array) -> None:
        assert leaf.grad is not None
        if total is not leaf.grad.data:
            leaf.grad.data[...] = total


class _Collecting:
    """Keeps the gradients of leaves, each by the tensor's id."""

    def __init__(self, found: dict[int, Array]) -> None:
        self._found = found

    def add(self, leaf: Tensor, g: Array) -> None:
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

    As torch.autograd.grad; an unused input gives None with `allow_unused`, else RuntimeError. Raises `Unsupported` for
    `create_graph`, since the engine is first order only, and what `backward` raises.
    """
    from .tensor import Tensor

    if create_graph:
        raise Unsupported("grad: create_graph=True asks for second-order gradients; the engine is first order only")
    outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ins = [_expected(t)._leaf for t in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    found: dict[int, Array] = {}
    targets: Targets = {(id(t._node), t._index): partial(found.__setitem__, id(t)) for t in ins if t._node is not None}
    oldest = min([t._node.seq for t in ins if t._node is not None], default=0)
    reach = Reach(targets, oldest, frozenset([id(t) for t in ins if t._node is None]))
    Pass(_Collecting(found), targets=targets, reach=reach).run(_roots(outs, given), retain_graph=retain_graph)
    missing = [i for i, t in enumerate(ins) if id(t) not in found]
    if missing and not allow_unused:
        raise RuntimeError(
            f"grad: input {missing[0]} was not used to compute the outputs; allow_unused=True gives None"
        )
    return tuple(Tensor(found[id(t)]) if id(t) in found else None for t in ins)


def _expected(t: Tensor) -> Tensor:
    if not hasattr(t, "_leaf"):
        raise TypeError(f"grad: expected Tensors as inputs, got {kind_of(t)}")
    return t


def _roots(outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None] | None) -> list[tuple[Tensor, Array]]:
    """Each output with the gradient that backward starts from, checked and in the output's dtype."""
    if grad_outputs is not None and len(grad_outputs) != len(outputs):
        raise ValueError(
            f"backward: expected a gradient, or None, for each output, got {len(grad_outputs)} for {len(outputs)}"
        )
    roots = []
    for i, t in enumerate(outputs):
        if not hasattr(t, "_leaf"):
            raise TypeError(f"backward: expected Tensors as outputs, got {kind_of(t)}")
        if not t.requires_grad:
            raise RuntimeError("backward: this tensor does not require grad; nothing it was computed from does")
        g = grad_outputs[i] if grad_outputs is not None else None
        if g is not None and not hasattr(g, "_leaf"):
            raise TypeError(f"backward: expected a Tensor or None as gradient, got {kind_of(g)}")
        if g is None:
            if t.size != 1:
                raise RuntimeError(
                    f"backward: a gradient must be given for a tensor of shape {t.shape}, only scalars need none"
                )
            roots.append((t, t.backend.xp.ones(t.shape, t.dtype)))
        elif g.shape != t.shape:
            raise ShapeError(f"backward: expected a gradient of shape {t.shape}, got {g.shape}")
        else:
            roots.append((t, g.data if g.dtype == t.dtype else g.data.astype(t.dtype)))
    return roots
