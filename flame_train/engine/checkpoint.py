"""Gradient checkpointing: keep a function's inputs, run it again when its gradient is wanted (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import kind_of
from .backprop import Pass
from .dtype import Array, is_float
from .graph import Edge, Held, Node
from .mode import mode, no_grad, recomputing
from .tensor import Tensor
from .writes import SEQUENCE

Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])


class _Away:
    """An activation kept in host memory until backward needs it."""

    __slots__ = ("_back",)

    def __init__(self, t: Tensor) -> None:
        self._back = t.backend.park(t.data)

    def back(self) -> Tensor:
        """The same values back on their device, as a leaf."""
        return Tensor(self._back(), requires_grad=True)


class _Recompute(Node):
    """A whole function as one node of the graph.

    Its backward pass runs the function again, and yields a contribution for each use of an argument inside. Each is
    sent on as it comes rather than summed here, so that all sums are taken in the order they would have without
    checkpointing, and are equal to the last bit.
    """

    __slots__ = ("args", "fn")
    hides = True

    def __init__(self, fn: Callable[..., Any], args: list[Any], edges: list[Edge], outs: tuple[Tensor, ...]) -> None:
        super().__init__(None, (), {}, edges, [(o.shape, o.dtype) for o in outs], outs[0].backend)
        self.fn, self.args = fn, args

    @property
    def kept(self) -> list[Any]:
        return [a.data for a in self.args if isinstance(a, Tensor)]

    def forget(self) -> None:
        super().forget()
        self.args = []

    def apply(
        self, grads: list[Array | None], held: Callable[[Edge], Held | None], around: Pass
    ) -> tuple[list[Array | None], frozenset[int]]:
        self._check_kept()
        since = next(SEQUENCE)
        fresh = [_fresh(a) for a in self.args]
        with recomputing():
            outs = _tuple(self.fn(*fresh))
        leaves = [t for t in fresh if isinstance(t, Tensor) and t.requires_grad]
        ways = {id(t): edge for t, edge in zip(leaves, self.edges, strict=True)}
        roots = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o.requires_grad]
        Pass(_Onward(ways, around), around=around, since=since).run(roots)
        return [None] * len(self.edges), frozenset()


class _Onward:
    """The sink of a recomputed function: contributions to its arguments go along `ways`, others to their leaves."""

    def __init__(self, ways: dict[int, Edge], around: Pass) -> None:
        self._ways, self._around = ways, around

    def add(self, leaf: Tensor, g: Array) -> None:
        edge = self._ways.get(id(leaf))
        self._around.add(leaf, g) if edge is None else self._around.send(edge, g)

    def held(self, leaf: Tensor) -> Held | None:
        edge = self._ways.get(id(leaf))
        return self._around.held(leaf) if edge is None else self._around.held_at(edge)

    def put(self, leaf: Tensor, total: Array) -> None:
        edge = self._ways.get(id(leaf))
        self._around.put(leaf, total) if edge is None else self._around.put_at(edge, total)


def _fresh(value: Any) -> Any:
    """An argument for the second run: a tensor that requires grad becomes a leaf, where the recomputed graph ends."""
    if isinstance(value, _Away):
        return value.back()
    if isinstance(value, Tensor) and value.requires_grad:
        return Tensor(value.data, requires_grad=True)
    return value


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    for o in found:
        if not isinstance(o, Tensor):
            where = "in a tuple" if isinstance(outputs, tuple) else "alone"
            raise TypeError(
                f"checkpoint: the function must return a Tensor or a tuple of them, got {kind_of(o)} {where}"
            )
    return found


def checkpoint(fn: Callable[..., Outputs], *args: Any, offload: bool = False) -> Outputs:
    """fn(*args) without keeping what happens inside; fn runs once more during backward.

    As torch.utils.checkpoint.checkpoint(use_reentrant=False): gradients reach its arguments, the parameters that fn
    uses, and other tensors from its surroundings, and equal those without checkpointing bit for bit. `fn` must be a
    pure function of all these, which must not be written before backward, and return a Tensor or a tuple of them. Side
    effects of ops, such as the update of batch_norm's running statistics, happen in the first run only.

    With `offload` arguments that are no leaves are kept in host memory until backward, so that a chain of checkpointed
    blocks keeps next to nothing on the device.

    Raises `TypeError` if fn returns anything else.
    """
    if not mode().grad:
        return fn(*args)
    edges = [Edge.to(a) for a in args if isinstance(a, Tensor) and a.requires_grad]
    if edges:
        with no_grad():
            made = fn(*args)
    else:  # only a graph shows whether fn uses parameters; it is dropped at once
        made = fn(*args)
    outs = _tuple(made)
    if not any(is_float(o.dtype) for o in outs) or not (edges or any(o.requires_grad for o in outs)):
        return made
    held = [_Away(a) if offload and isinstance(a, Tensor) and not a.is_leaf else a for a in args]
    node = _Recompute(fn, held, edges, outs)
    wrapped = tuple(Tensor._from_op(o.data, node, i) for i, o in enumerate(outs))
    return wrapped if isinstance(made, tuple) else wrapped[0]
