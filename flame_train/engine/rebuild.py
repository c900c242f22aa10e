"""Rebuilding: cheap values are not saved for the backward pass, which recomputes them where a gradient needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .dtype import Array
from .mode import mode, no_grad

if TYPE_CHECKING:
    from .tensor import Tensor


class Recipe:
    """How to recompute a value, saved in its place. Its arguments may be such recipes themselves."""

    __slots__ = ("args", "fn", "shape")

    def __init__(self, fn: Callable[..., Tensor], args: list[Any], shape: tuple[int, ...]) -> None:
        self.fn, self.args, self.shape = fn, args, shape

    @property
    def kept(self) -> list[Array]:
        """The arrays that recomputing it needs, and that are therefore kept alive."""
        nested = [x for a in self.args if isinstance(a, Recipe) for x in a.kept]
        return nested + [a.data for a in self.args if hasattr(a, "data")]

    def make(self) -> Array:
        """The value, bit for bit as it was."""
        with no_grad():
            return self._tensor().data

    def _tensor(self) -> Tensor:
        return self.fn(*[a._tensor() if isinstance(a, Recipe) else a for a in self.args])


def rebuild(fn: Callable[..., Tensor], *args: Any, least: int = 0) -> Tensor:
    """fn(*args), which no later op saves: an op whose gradient needs the result runs fn again.

    A result of fewer than `least` bytes is saved as usual: launching a kernel costs time however little it saves.

    The ops inside `fn` save what their own gradients need, unlike with `checkpoint`. So this pays where those values
    suffice to recompute the result and a costlier op would otherwise save it too, as when a linear layer with a LoRA
    takes the output of a norm or an activation. `fn` must be a pure function of its arguments. Each op that needs the
    result runs it once. An argument that is a rebuilt result itself is not saved either: it is rebuilt in turn.

    Nothing is rebuilt inside a checkpoint that runs again, since its values are needed at once, nor where an op inside
    `fn` saves the result for its own gradient, since it is then there anyway.
    """
    out = fn(*args)
    if out.data.nbytes >= least and mode().grad and not mode().recomputing and not _kept_inside(out, args):
        out._recipe = Recipe(fn, [_held(a) for a in args], out.shape)
    return out


def _kept_inside(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether one of the ops between `args` and `out` saves memory that `out` lies in."""
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
    """The arrays and Tensors' arrays among `values`, and inside lists and tuples among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from arrays_in(value)
        elif hasattr(value, "detach"):  # a Tensor, as in a saved index
            yield value.data
        elif hasattr(value, "nbytes"):
            yield value


def _held(arg: Any) -> Any:
    """An argument as a recipe keeps it: a Tensor without its graph, or that Tensor's own recipe."""
    if not hasattr(arg, "detach"):
        return arg
    return arg.detach() if arg._recipe is None else arg._recipe
