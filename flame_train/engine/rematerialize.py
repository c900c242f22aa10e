"""Rematerialization: a cheap value is not saved for the backward pass, which recomputes it where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .autograd.graph import Remat
from .mode import mode
from .tensors.tensor import Tensor


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
