"""Gradient checkpointing: keep a function's inputs, run it again when its gradient is wanted (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import kind_of
from .autograd.graph import CheckpointNode, Edge, Remat
from .dtype import is_float
from .mode import Mode, mode, no_grad, recomputing
from .tensors.tensor import Tensor

Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])


class _OffloadedActivation:
    """An activation kept in host memory until backward needs it."""

    __slots__ = ("_held",)

    def __init__(self, t: Tensor) -> None:
        self._held = t.backend.offload(t.data)

    def reload(self) -> Tensor:
        """Returns the same values back on their device, as a leaf."""
        return Tensor(self._held.reload(), requires_grad=True)


class _Rerun:
    """Runs a function a second time, recording a graph that ends at its arguments."""

    __slots__ = ("_first", "_fn")

    def __init__(self, fn: Callable[..., Any], first: Mode) -> None:
        self._fn, self._first = fn, first

    def __call__(self, args: list[Any]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        detached = [_detached(a) for a in args]
        with recomputing(self._first):
            outputs = _tuple(self._fn(*detached))
        return outputs, [t for t in detached if isinstance(t, Tensor) and t.requires_grad]


def _detached(value: Any) -> Any:
    """Returns an argument for the second run; one that requires grad becomes a leaf, where the new graph ends."""
    if isinstance(value, _OffloadedActivation):
        return value.reload()
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

    With `offload` arguments that are no leaves are kept in host memory until backward. So a chain of checkpointed
    blocks keeps next to nothing on the device.

    Raises `TypeError` if fn returns anything else.
    """
    if not mode().grad:
        return fn(*args)
    first = mode()
    edges = [Edge(a) for a in args if isinstance(a, Tensor) and a.requires_grad]
    if edges:
        with no_grad():
            made = fn(*args)
    else:  # only a graph shows whether fn uses parameters; it is dropped at once
        made = fn(*args)
    outs = _tuple(made)
    if not any(is_float(o.dtype) for o in outs) or not (edges or any(o.requires_grad for o in outs)):
        return made
    kept = [_OffloadedActivation(a) if offload and isinstance(a, Tensor) and not a.is_leaf else a for a in args]
    shapes = [(o.shape, o.dtype) for o in outs]
    node = CheckpointNode(_Rerun(fn, first), kept, edges, shapes, outs[0].backend)
    wrapped = tuple(Tensor._from_op(o.data, node, i) for i, o in enumerate(outs))
    return wrapped if isinstance(made, tuple) else wrapped[0]


def rematerialize(fn: Callable[..., Tensor], *args: Any, min_bytes: int = 0, within_checkpoint: bool = False) -> Tensor:
    """fn(*args), which no later op saves: an op whose gradient needs the result runs fn again.

    A result of fewer than `min_bytes` bytes is saved as usual: launching a kernel costs time however little it saves.

    The ops inside `fn` save what their own gradients need, unlike with `checkpoint`. So this pays where those values
    suffice to recompute the result and a costlier op would otherwise save it too. An example is when a linear layer
    with a LoRA takes the output of a norm or an activation. `fn` must be a pure function of its arguments. Each op that
    needs the result runs it once. An argument that is itself rematerialized is not saved either: it is recomputed in
    turn.

    Nothing is rematerialized inside a checkpoint that runs again, since its values are needed at once. With
    `within_checkpoint` it is, which suits what is large beside all that the checkpoint computes. Neither is a result
    that an op inside `fn` saves for its own gradient, since it is then there anyway.
    """
    first = mode()
    out = fn(*args)
    kept = mode().recomputing and not within_checkpoint
    if out.data.nbytes >= min_bytes and mode().grad and not kept and not _saved_inside(out, args):
        out._remat = Remat(fn, [_kept(a) for a in args], out.shape, first)
    return out


def _saved_inside(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Tells whether one of the ops between `args` and `out` saves memory that `out` lies in."""
    overlap = out.backend.xp.may_share_memory
    before = {a._node for a in args if isinstance(a, Tensor)}
    ahead = [out._node]
    while ahead:
        node = ahead.pop()
        if node is None or node in before:
            continue
        if any(overlap(array, out.data) for array in node.saved_arrays):
            return True
        ahead += [edge.node for edge in node.edges]
    return False


def _kept(arg: Any) -> Any:
    """Returns an argument as a recipe keeps it: a Tensor without its graph, or that Tensor's own recipe."""
    if not isinstance(arg, Tensor):
        return arg
    return arg.detach() if arg._remat is None else arg._remat
