"""The graph: a node for each op that ran, with what it saved for its gradient and the edges its gradients go along.

Nodes are data, which the backward pass (`backprop.py`) walks and runs. They point only to what they were computed
from, so there are no cycles. Reference counting frees activations as soon as the pass is done with a node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from ..backend import Backend
from ..dtype import Array, DType
from ..mode import Mode, mode, recomputing
from ..op import VJP
from ..user_line import user_line
from .versions import SEQUENCE

ArrayHook = Callable[[Array], Array]
"""A hook as the backward pass calls it: of the gradient's array, returning the array to pass on."""


class Hooks(dict[object, ArrayHook]):
    """The hooks of one tensor, in the order in which they were registered."""

    def run(self, g: Array) -> Array:
        """The gradient that the hooks make of `g`, one after another. A hook may remove any of them meanwhile."""
        for hook in tuple(self.values()):
            g = hook(g)
        return g

    def register(self, hook: ArrayHook) -> HookHandle:
        """Adds a hook; the same function may be added several times."""
        key = object()
        self[key] = hook
        return HookHandle(self, key)


class HookHandle:
    """Returned by `register_hook`; `remove()`, or leaving a `with` over it, takes the hook off again.

    It does not keep the hooks alive, nor they it: what a hook of a computed tensor refers to goes with the graph.
    """

    __slots__ = ("_hooks", "_key")

    def __init__(self, hooks: Hooks, key: object) -> None:
        self._hooks = weakref.ref(hooks)
        self._key = key

    def remove(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.pop(self._key, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


Shaped = tuple[tuple[int, ...], DType]
"""Shape and dtype."""


class GraphTensor(Protocol):
    """What the graph and the backward pass know of a `Tensor`, which is made of them."""

    @property
    def data(self) -> Array: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def grad(self) -> GraphTensor | None: ...
    @property
    def _node(self) -> Node | None: ...
    @property
    def _index(self) -> int: ...
    @property
    def _hooks(self) -> Hooks | None: ...
    @property
    def _leaf(self) -> GraphTensor:
        """The tensor that keeps the gradient reaching this leaf, and whose hooks see it."""

    def _accumulate(self, g: Array) -> None:
        """Adds a complete gradient to `grad`. `g` is copied: others may refer to it."""


class Edge:
    """Where the gradient of an op's input goes: to output `index` of another node, or to a leaf.

    `arg` is the input's name and `item` its index if that argument is a list. `shape` and `dtype` are the gradient's.
    """

    __slots__ = ("arg", "dtype", "index", "item", "leaf", "node", "shape")

    def __init__(self, t: GraphTensor, arg: str = "", item: int | None = None) -> None:
        """Returns the edge from argument `arg` to the node that computed `t`, or to `t` itself if it is a leaf."""
        self.arg, self.item = arg, item
        self.node, self.index = t._node, t._index
        self.leaf = t._leaf if t._node is None else None
        self.shape: tuple[int, ...] = t.data.shape
        self.dtype: DType = t.data.dtype if self.leaf is None else self.leaf.data.dtype


class Node:
    """One op that ran: its formulas, exactly the values they name, and the edges its gradients go along.

    `hooks` are those of the output tensors, by index. `line` is the user's line that made it, where somebody watches.

    Args:
        name: the op's name.
        formulas: those that compute the gradients.
        saved: the values that these name.
        edges: where the gradients go.
        outputs: shapes and dtypes of the results.
        backend: where the op ran.
        multiple: whether the results are a tuple, even if there is one.
        split_views: maps an array of the input's shape to views that correspond to the outputs, if these are views.
    """

    __slots__ = (
        "__weakref__",
        "backend",
        "edges",
        "formulas",
        "hooks",
        "line",
        "multiple",
        "name",
        "outputs",
        "saved",
        "seq",
        "split_views",
    )
    opaque = False
    """True if gradients may also go to tensors that no edge leads to: a checkpointed function can use any tensor."""

    def __init__(
        self,
        name: str,
        formulas: tuple[VJP, ...],
        saved: dict[str, Any],
        edges: list[Edge],
        outputs: list[Shaped],
        backend: Backend,
        *,
        multiple: bool = False,
        split_views: Callable[[Array], list[Array]] | None = None,
    ) -> None:
        self.name, self.formulas, self.edges = name, formulas, edges
        self.saved: dict[str, Any] | None = saved
        self.outputs, self.backend, self.multiple, self.split_views = outputs, backend, multiple, split_views
        self.seq = next(SEQUENCE)
        self.line = user_line() if mode().watch else ""
        self.hooks: dict[int, Hooks] = {}

    @property
    def saved_arrays(self) -> Iterator[Array]:
        """The arrays that the node keeps alive for its backward pass."""
        return arrays_in((self.saved or {}).values())

    def release_saved(self) -> None:
        """Frees what was saved, and hooks, which will not be called again and may refer to the tensors they are of.

        The node itself lives as long as the result that was differentiated.
        """
        self.saved = None
        self.hooks.clear()


class CheckpointNode(Node):
    """A checkpointed function as one node, which saves the function's arguments.

    `rerun` runs the function again on them. It returns the outputs, and the leaves that stand for the arguments of the
    edges, in the edges' order.

    Args:
        rerun: runs the function again on the arguments.
        args: the function's arguments.
        edges: where the gradients go.
        outputs: shapes and dtypes of the results.
        backend: where the function ran.
    """

    __slots__ = ("rerun",)
    opaque = True

    def __init__(
        self,
        rerun: Callable[[list[Any]], tuple[Sequence[GraphTensor], Sequence[GraphTensor]]],
        args: list[Any],
        edges: list[Edge],
        outputs: list[Shaped],
        backend: Backend,
    ) -> None:
        super().__init__("checkpoint", (), {"args": args}, edges, outputs, backend)
        self.rerun = rerun


class Remat:
    """How to recompute a value, saved in its place. Its arguments may be such recipes themselves."""

    __slots__ = ("args", "first", "fn", "shape")

    def __init__(self, fn: Callable[..., GraphTensor], args: list[Any], shape: tuple[int, ...], first: Mode) -> None:
        self.fn, self.args, self.shape, self.first = fn, args, shape, first

    def materialize(self) -> Array:
        """Returns the value, bit for bit as it was."""
        return self._tensor().data

    def _tensor(self) -> GraphTensor:
        args = [a._tensor() if isinstance(a, Remat) else a for a in self.args]
        with recomputing(self.first, grad=False):
            return self.fn(*args)


def arrays_in(values: Iterable[Any]) -> Iterator[Array]:
    """Yields the arrays among `values`, those of Tensors, and those inside lists, tuples and `Remat`s."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from arrays_in(value)
        elif isinstance(value, Remat):
            yield from arrays_in(value.args)
        elif hasattr(value, "_leaf"):  # a Tensor, as in a saved index
            yield value.data
        elif hasattr(value, "nbytes"):
            yield value
