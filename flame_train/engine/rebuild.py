"""Values that are cheaply made again are not kept for the backward pass; it makes them anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .dtype import Array
from .mode import mode, no_grad

if TYPE_CHECKING:
    from .tensor import Tensor


class Again:
    """How a value is made, kept in the place of the value. Among its arguments may be others of the kind."""

    __slots__ = ("args", "fn", "shape")

    def __init__(self, fn: Callable[..., Tensor], args: list[Any], shape: tuple[int, ...]) -> None:
        self.fn, self.args, self.shape = fn, args, shape

    @property
    def kept(self) -> list[Array]:
        """What is held on to in order to make it."""
        nested = [x for a in self.args if isinstance(a, Again) for x in a.kept]
        return nested + [a.data for a in self.args if hasattr(a, "data")]

    def make(self) -> Array:
        """The value, to the last bit as it was."""
        with no_grad():
            return self._tensor().data

    def _tensor(self) -> Tensor:
        return self.fn(*[a._tensor() if isinstance(a, Again) else a for a in self.args])


def rebuild(fn: Callable[..., Tensor], *args: Any, least: int = 0) -> Tensor:
    """fn(*args), which no later op keeps: where one needs it for a gradient, fn runs again.

    A result of fewer bytes than `least` is kept like any other: to launch a kernel takes time whatever it saves.

    Unlike `checkpoint`, `fn` itself is differentiated as if it stood alone, keeping what its own ops need. It pays
    where that is all that making the result takes, and a costlier op wants the result: what a norm or an activation
    hands to a linear layer with a LoRA. `fn` must be a pure function of its arguments; each op that wants the result
    runs it once. An argument that is such a result itself is not kept either: it is made from its own.

    What a checkpoint runs again is wanted soon after, so it is kept till then. And what the ops inside `fn` keep for
    gradients of their own is there for others too.
    """
    out = fn(*args)
    if out.data.nbytes >= least and mode().grad and not mode().recomputing and not _kept_inside(out, args):
        out._again = Again(fn, [_held(a) for a in args], out.shape)
    return out


def _kept_inside(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether one of the ops that made `out` of `args` keeps it."""
    overlap = out.backend.xp.may_share_memory
    before = {a._node for a in args if hasattr(a, "detach")}
    ahead = [out._node]
    while ahead:
        node = ahead.pop()
        if node is None or node in before:
            continue
        if any(overlap(array, out.data) for array in arrays_in(node.kept)):
            return True
        ahead += [edge.node for edge in node.edges]
    return False


def arrays_in(values: Iterable[Any]) -> Iterator[Array]:
    """The arrays among what a node keeps, and inside lists of them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from arrays_in(value)
        elif hasattr(value, "detach"):  # a Tensor in an index
            yield value.data
        elif hasattr(value, "nbytes"):
            yield value


def _held(arg: Any) -> Any:
    if not hasattr(arg, "detach"):
        return arg
    return arg.detach() if arg._again is None else arg._again
