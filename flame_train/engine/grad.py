"""`grad`: gradients that are returned instead of accumulated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..errors import Unsupported, kind_of
from .autograd.backprop import BackwardPass, roots_of
from .autograd.grad_paths import GradPaths, Listeners
from .autograd.grad_target import GradTarget
from .autograd.graph import GraphTensor
from .dtype import Array
from .tensors.tensor import Tensor


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the sum of `outputs` with respect to `inputs`; no `.grad` is touched.

    As torch.autograd.grad; an unused input gives None with `allow_unused`, else RuntimeError. Raises `Unsupported` for
    `create_graph`, since the engine is first order only, and what `backward` raises.

    Args:
        outputs: tensors to differentiate.
        inputs: tensors to differentiate with respect to.
        grad_outputs: the gradient of each output; None: ones for a single value.
        retain_graph: whether the graph may be used again.
        create_graph: must be False.
        allow_unused: whether an input may have no part in the outputs.

    Raises:
        RuntimeError: an unused input without `allow_unused`.
        Unsupported: `create_graph`.
    """
    if create_graph:
        raise Unsupported("grad: create_graph=True asks for second-order gradients; the engine is first order only")
    outs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    ins = [_expected(t)._leaf for t in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    found: dict[int, Array] = {}
    nodes = [(t, t._node) for t in ins if t._node is not None]
    listeners: Listeners = {(id(node), t._index): partial(found.__setitem__, id(t)) for t, node in nodes}
    leaves = frozenset([id(t) for t in ins if t._node is None])
    paths = GradPaths(listeners, min([node.seq for _, node in nodes], default=0), leaves)
    run = BackwardPass(_CollectGrads(found), listeners=listeners, paths=paths)
    run.run(roots_of(outs, given), retain_graph=retain_graph)
    missing = [i for i, t in enumerate(ins) if id(t) not in found]
    if missing and not allow_unused:
        raise RuntimeError(
            f"grad: input {missing[0]} was not used to compute the outputs; allow_unused=True gives None"
        )
    return tuple(Tensor(found[id(t)]) if id(t) in found else None for t in ins)


def _expected(t: Tensor) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"grad: expected Tensors as inputs, got {kind_of(t)}")
    return t


class _CollectGrads:
    """Keeps the gradients of leaves, each by the tensor's id."""

    def __init__(self, found: dict[int, Array]) -> None:
        self._found = found

    def add(self, leaf: GraphTensor, g: Array) -> None:
        self._found[id(leaf)] = g

    def target(self, leaf: GraphTensor) -> GradTarget | None:
        return None

    def set(self, leaf: GraphTensor, total: Array) -> None:
        raise AssertionError("no gradient has arrived at a leaf before the pass is over")
