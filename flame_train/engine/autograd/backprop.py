"""The backward pass: gradients carried from roots to leaves, node by node, newest first (by `Node.seq`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from ...errors import ShapeError, kind_of
from ..backend import Backend, same_place, several_gpus
from ..dtype import Array
from ..mode import mode
from ..sums import unbroadcast
from .grad_paths import GradPaths, Listeners
from .grad_target import (
    ALLOCATE,
    GradAccumulator,
    GradTarget,
    ViewBuffers,
    along_edge,
    by_argument,
    call,
    check_saved,
    dense_grads,
)
from .graph import CheckpointNode, Edge, GraphTensor, Node
from .versions import SEQUENCE

Root = tuple[GraphTensor, Array]
"""An output and the gradient that the pass starts from."""


class Passes:
    """How many times `backward` was called: so that an optimizer knows where its gradients may come from."""

    count = 0


class LeafSink(Protocol):
    """Where the gradients of leaves go.

    A formula may add its contribution itself, in the same kernel that computes it. Then `target` gives it what has
    arrived and `set` takes the total. Otherwise `add` takes the contribution alone.
    """

    def add(self, leaf: GraphTensor, g: Array) -> None:
        """Adds one contribution."""

    def target(self, leaf: GraphTensor) -> GradTarget | None:
        """Returns what a formula may add the next contribution to; None if it must hand that to `add`."""

    def set(self, leaf: GraphTensor, total: Array) -> None:
        """Takes the sum of what had arrived and a further contribution."""


class BackwardPass:
    """One pass backward over a graph. It is also the `LeafSink` of the passes inside the checkpoints that it meets.

    A pass inside a checkpoint has a `parent`, and hands every contribution to a leaf on as it comes. The outermost pass
    alone knows the whole gradient: it adds the contributions up, in the order of a run without checkpoints, and calls
    the hooks. Contributions to nodes older than `min_seq`, the first number of the recomputed graph, are handed on too.
    They belong to tensors that the function used without taking them as arguments.

    `listeners` receive the gradients of tensors that are no leaves. `paths` restricts the pass to what leads to them or
    to the leaves that were requested; without it all leaves get theirs.

    Args:
        sink: gets the gradients of leaves.
        parent: the pass that met the checkpoint, or None.
        min_seq: number of the first node of the recomputed graph.
        listeners: get the gradients of tensors that are no leaves.
        paths: the nodes that the pass may visit; None: all.
    """

    def __init__(
        self,
        sink: LeafSink,
        *,
        parent: BackwardPass | None = None,
        min_seq: int = 0,
        listeners: Listeners | None = None,
        paths: GradPaths | None = None,
    ) -> None:
        self._sink, self._parent, self._min_seq = sink, parent, min_seq
        self._listeners, self._paths = listeners or {}, paths
        self._pending: dict[Node, GradAccumulator] = {}
        self._heap: list[tuple[int, Node]] = []
        self._leaves: dict[int, tuple[GraphTensor, GradAccumulator]] = {}
        self._views = ViewBuffers()

    @np.errstate(all="ignore")
    def run(self, roots: Sequence[Root], *, retain_graph: bool = False) -> None:
        """Carries gradients from `roots` to the leaves; each leaf's is handed to the sink once.

        Frees what nodes saved unless `retain_graph`. Raises `RuntimeError` where that is freed or overwritten.
        """
        for t, g in roots:
            self.send(Edge(t), g)
        while self._heap:
            node = heapq.heappop(self._heap)[1]
            if several_gpus():
                node.backend.enter_thread()
            grads = self._complete(node)
            if self._paths is not None and not self._paths.through(node):
                continue
            sent, totals = self._observed(node, grads)
            for i, (edge, g) in enumerate(zip(node.edges, sent, strict=True)):
                if g is not None:
                    whole = _fitted(node.backend, g, edge)
                    (self.set_at if i in totals else self.send)(edge, whole)
            if not retain_graph:
                node.release_saved()
            del grads, sent
        if self._parent is None:
            for t, _ in roots:
                t.backend.wait_side_stream()
        for leaf, accumulator in self._leaves.values():
            g = accumulator.values[0]
            if several_gpus():
                leaf.backend.enter_thread()  # the sink may copy, and CuPy makes a copy on the GPU that is current
            self._sink.add(leaf, leaf._hooks.run(g) if leaf._hooks else g)

    def _complete(self, node: Node) -> list[Array | None]:
        """Returns a node's complete gradients as its tensors' hooks leave them. The listeners receive them too."""
        grads = self._pending.pop(node).values
        for index, hooks in node.hooks.items():
            if hooks and grads[index] is not None:
                grads[index] = hooks.run(grads[index])
        if self._listeners:
            for index, g in enumerate(grads):
                if g is not None and (id(node), index) in self._listeners:
                    self._listeners[id(node), index](g)
        return grads

    # ---- running a node ----------------------------------------------------------------------------

    def _observed(self, node: Node, grads: list[Array | None]) -> tuple[list[Array | None], frozenset[int]]:
        """Returns `_run`, with the mode's hooks called before and after."""
        hooks, watch = mode().hooks, mode().watch
        for h in hooks:
            h.before(node.name, "backward", [g for g in grads if g is not None])
        for w in watch:
            w.before_node(node, grads)
        sent, totals = self._run(node, grads)
        for w in watch:
            w.after_node(node, grads, sent)
        for h in hooks:
            h.after(node.name, "backward", [g for g in sent if g is not None])
        return sent, totals

    def _run(self, node: Node, grads: list[Array | None]) -> tuple[list[Array | None], frozenset[int]]:
        """Returns the gradients along the node's edges, and the edges where that includes what had arrived."""
        check_saved(node)
        if isinstance(node, CheckpointNode):
            self._rerun(node, grads)
            return [None] * len(node.edges), frozenset()
        g: Any = dense_grads(node, grads) if node.multiple else grads[0]
        needs = frozenset([e.arg for e in node.edges if self._paths is None or self._paths.along(e)])
        by_edge = self._targets(node, grads, needs)
        targets = by_argument(node, by_edge)
        results: dict[str, Any] = {}
        for formula in node.formulas:
            if needs.isdisjoint(formula.args):
                continue
            found = call(node, formula, g, {"needs": needs, "targets": targets})
            results.update(zip(formula.args, found if len(formula.args) > 1 else (found,), strict=True))
        sent = [along_edge(results.get(e.arg), e.item) for e in node.edges]
        for i, target in by_edge.items():
            lent = target.addend is None and target.buffer is not None and node.split_views is None
            if lent and not same_place(sent[i], target.buffer):
                self._views.release(node.edges[i])
        return sent, frozenset([i for i, target in by_edge.items() if target.addend is not None])

    def _targets(self, node: Node, grads: list[Array | None], needs: frozenset[str]) -> dict[int, GradTarget]:
        """Returns the targets of the formulas that take them, by the index of the edge."""
        whole = None if node.split_views is None else self._views.pop_whole(node, grads)
        taking = {a for f in node.formulas if "targets" in f.takes for a in f.args if a in needs}
        if not taking:
            return {}
        found = self._arrived(node, {a for f in node.formulas if f.accumulates for a in f.args if a in taking})
        for i, e in enumerate(node.edges):
            if e.arg in taking and i not in found:
                buffer = self._views.acquire(e, self._is_free) if node.split_views is None else whole
                found[i] = ALLOCATE if buffer is None else GradTarget(buffer=buffer)
        return found

    def _arrived(self, node: Node, args: set[str]) -> dict[int, GradTarget]:
        """Returns the targets along `args` where gradients arrived, all or none; none if two edges meet."""
        if not args or len({(id(e.node or e.leaf), e.index) for e in node.edges}) < len(node.edges):
            return {}
        found = {i: self.target_at(e) for i, e in enumerate(node.edges) if e.arg in args}
        missing = {node.edges[i].arg for i, target in found.items() if target is None}
        return {i: target for i, target in found.items() if target is not None and node.edges[i].arg not in missing}

    def _rerun(self, node: CheckpointNode, grads: list[Array | None]) -> None:
        """Reruns a checkpoint and its pass; contributions go on one by one, so sums have the order of a run without."""
        assert node.saved is not None
        min_seq = next(SEQUENCE)
        outputs, leaves = node.rerun(node.saved["args"])
        edges = {id(leaf): edge for leaf, edge in zip(leaves, node.edges, strict=True)}
        roots = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        BackwardPass(_ForwardToParent(edges, self), parent=self, min_seq=min_seq).run(roots)

    # ---- along edges -------------------------------------------------------------------------------

    def send(self, edge: Edge, g: Array) -> None:
        """One more contribution along an edge."""
        if self._paths is not None and not self._paths.along(edge):
            return
        outside = self._outside(edge)
        if outside is not None:
            outside.send(edge, g)
        elif edge.node is not None:
            pending = self._pending.get(edge.node)
            if pending is None:
                pending = self._pending[edge.node] = GradAccumulator(len(edge.node.outputs))
                heapq.heappush(self._heap, (-edge.node.seq, edge.node))
            pending.add(edge.index, g)
        elif edge.leaf is not None:
            self.add(edge.leaf, g)

    def _outside(self, edge: Edge) -> BackwardPass | None:
        """Returns the parent if an edge leads out of the recomputed graph, else None."""
        return self._parent if edge.node is not None and edge.node.seq < self._min_seq else None

    def _is_free(self, edge: Edge) -> bool:
        """Tells whether an edge ends inside this pass and nothing has arrived there."""
        return self._outside(edge) is None and self.target_at(edge) is None

    def target_at(self, edge: Edge) -> GradTarget | None:
        """Returns what has arrived at an edge's end and may be added to; None if nothing."""
        outside = self._outside(edge)
        if outside is not None:
            return outside.target_at(edge)
        if edge.node is not None:
            pending = self._pending.get(edge.node)
            return pending.target(edge.index) if pending else None
        return self.target(edge.leaf) if edge.leaf is not None else None

    def set_at(self, edge: Edge, total: Array) -> None:
        """Replaces what had arrived at an edge's end by its sum with a further contribution."""
        outside = self._outside(edge)
        if outside is not None:
            outside.set_at(edge, total)
        elif edge.node is not None:
            self._pending[edge.node].set(edge.index, total)
        elif edge.leaf is not None:
            self.set(edge.leaf, total)

    # ---- to leaves ---------------------------------------------------------------------------------

    def add(self, leaf: GraphTensor, g: Array) -> None:
        if self._parent is not None:
            self._sink.add(leaf, g)
        elif self._paths is None or self._paths.to(leaf):
            self._leaves.setdefault(id(leaf), (leaf, GradAccumulator(1)))[1].add(0, g)

    def target(self, leaf: GraphTensor) -> GradTarget | None:
        if id(leaf) in self._leaves:
            return self._leaves[id(leaf)][1].target(0)
        return None if leaf._hooks else self._sink.target(leaf)

    def set(self, leaf: GraphTensor, total: Array) -> None:
        if id(leaf) in self._leaves:
            self._leaves[id(leaf)][1].set(0, total)
        else:
            self._sink.set(leaf, total)


def _fitted(backend: Backend, g: Array, edge: Edge) -> Array:
    """Returns a formula's result in the shape and dtype of the tensor at the edge's end."""
    if backend.kernels is not None and g.shape == edge.shape and g.dtype != edge.dtype:
        cast: Array = backend.kernels.cast(g, edge.dtype)
        return cast
    return unbroadcast(backend.xp, g, edge.shape, edge.dtype)


class _ForwardToParent:
    """The sink of a recomputed function: contributions to its arguments go along `edges`, others to their leaves."""

    def __init__(self, edges: dict[int, Edge], parent: BackwardPass) -> None:
        self._edges, self._parent = edges, parent

    def add(self, leaf: GraphTensor, g: Array) -> None:
        edge = self._edges.get(id(leaf))
        self._parent.add(leaf, g) if edge is None else self._parent.send(edge, g)

    def target(self, leaf: GraphTensor) -> GradTarget | None:
        edge = self._edges.get(id(leaf))
        return self._parent.target(leaf) if edge is None else self._parent.target_at(edge)

    def set(self, leaf: GraphTensor, total: Array) -> None:
        edge = self._edges.get(id(leaf))
        self._parent.set(leaf, total) if edge is None else self._parent.set_at(edge, total)


def backward(
    outputs: GraphTensor | Sequence[GraphTensor],
    grad_outputs: GraphTensor | Sequence[GraphTensor | None] | None = None,
    *,
    retain_graph: bool = False,
) -> None:
    """Accumulates d outputs / d leaf into the `.grad` of every leaf, as torch.autograd.backward.

    `outputs` is a Tensor or several. `grad_outputs` holds a gradient of its output's shape for each; None stands for 1
    at a scalar.

    Raises `RuntimeError` for an output that does not require grad, and a missing gradient of one that is no scalar.
    Raises it for a graph that is freed or whose tensors were written in place. Raises `TypeError`, `ValueError` or
    `ShapeError` for arguments of another kind, number or shape.
    """
    Passes.count += 1
    several = _listed(outputs)
    given = None if grad_outputs is None else _listed(grad_outputs)
    BackwardPass(_AccumulateGrad()).run(roots_of(several, given), retain_graph=retain_graph)


def _listed(given: Any) -> Sequence[Any]:
    """Returns one tensor as a list of one. Raises `TypeError` for what is neither a Tensor nor a sequence."""
    if hasattr(given, "_leaf"):
        return [given]
    if not isinstance(given, Iterable):
        raise TypeError(f"backward: expected a Tensor or a list of them, got {kind_of(given)}")
    return list(given)


class _AccumulateGrad:
    """Adds to the leaves' `.grad`, but for those that were frozen since they were used."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, leaf: GraphTensor, g: Array) -> None:
        if leaf.requires_grad:
            leaf._accumulate(g)

    def target(self, leaf: GraphTensor) -> GradTarget | None:
        if leaf.grad is None or not leaf.requires_grad:
            return None
        if id(leaf) in self._seen:  # a second contribution is added to the first, which must be there
            leaf.backend.wait_side_stream()
        self._seen.add(id(leaf))
        same_dtype = leaf.grad.dtype == leaf.dtype  # else the sent gradient is read, to be converted
        return GradTarget(leaf.grad.data, leaf.grad.data, deferrable=same_dtype and not mode().hooks)

    def set(self, leaf: GraphTensor, total: Array) -> None:
        assert leaf.grad is not None
        if total is not leaf.grad.data:
            leaf.grad.data[...] = total


def roots_of(outputs: Sequence[GraphTensor], grad_outputs: Sequence[GraphTensor | None] | None) -> list[Root]:
    """Returns each output with the gradient that backward starts from, checked and in the output's dtype."""
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
