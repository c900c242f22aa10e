"""Running a node's formulas: what they are given, and which gradient goes along which edge."""

from __future__ import annotations

from typing import Any

from ..dtype import Array, DType, compute_dtype, is_float
from ..op import VJP
from .grad_target import GradTarget, GradTargets
from .graph import Node, Remat
from .versions import VERSIONS


def check_saved(node: Node) -> None:
    """Raises `RuntimeError` if what a node saved has been freed, or has been written in place since."""
    if node.saved is None:
        raise RuntimeError(
            f"{node.name}: backward ran through this graph already and freed it; "
            "compute the result again, or pass retain_graph=True the first time"
        )
    if VERSIONS.last > node.seq and VERSIONS.written_since(node.seq, node.saved_arrays):
        raise RuntimeError(
            f"{node.name}: a tensor that its gradient needs was written in place since; "
            "write it after backward, or write a clone()"
        )


def dense_grads(node: Node, grads: list[Array | None]) -> tuple[Array, ...]:
    """The `g` of an op with several outputs: a tuple with zeros where no gradient arrived.

    Those of whole numbers, such as the indices of `sort`, are one zero seen as many: nobody reads them.
    """
    xp = node.backend.xp

    def zeros(shape: tuple[int, ...], dtype: DType) -> Array:
        made: Array = xp.zeros(shape, dtype) if is_float(dtype) else xp.broadcast_to(xp.zeros((), dtype), shape)
        return made

    return tuple([zeros(*o) if g is None else g for g, o in zip(grads, node.outputs, strict=True)])


def by_argument(node: Node, by_edge: dict[int, GradTarget]) -> GradTargets:
    """Targets as formulas take them."""
    found: dict[str, Any] = {}
    for i, target in by_edge.items():
        e = node.edges[i]
        if e.item is None:
            found[e.arg] = target
        else:
            found.setdefault(e.arg, {})[e.item] = target
    return found


def call(node: Node, formula: VJP, g: Any, extras: dict[str, Any]) -> Any:
    """What a formula returns for gradients `g` of the outputs; computed in fp32 or fp64 if it asks for that."""
    assert node.saved is not None
    values = [_materialized(node.saved[n]) for n in formula.names]
    given = {n: extras[n] for n in formula.takes}
    if formula.impl != "reference":
        k = node.backend.kernels
        return formula.fn(k, k.aligned(g), *values, **given)
    if formula.promotes:
        g, *values = (_promoted(v) for v in (g, *values))
    return formula.fn(node.backend.references, g, *values, **given)


def along_edge(found: Any, item: int | None) -> Array | None:
    """An edge's gradient of those found for its argument: an item of them if that is a list; None if there are none."""
    return found if item is None or found is None else found[item]


def _materialized(value: Any) -> Any:
    """A saved value; recomputed if only how to make it was saved."""
    if isinstance(value, list):
        return [_materialized(v) for v in value]
    return value.materialize() if isinstance(value, Remat) else value


def _promoted(value: Any) -> Any:
    """An array, or the arrays in a list, in the dtype that references compute in; anything else as it is."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        work = compute_dtype(dtype)
        return value if work == dtype else value.astype(work)
    if isinstance(value, (list, tuple)) and any(hasattr(v, "dtype") for v in value):
        return type(value)(_promoted(v) for v in value)
    return value
