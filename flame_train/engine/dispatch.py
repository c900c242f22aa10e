"""Running an op: choosing its implementation, handling precision, recording the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.exceptions import AxisError

from ..errors import ShapeError
from .backend import Backend, get_backend
from .dtype import Array, DType, compute_dtype, float32, float64, is_float, promote
from .graph import Edge, Node
from .mode import Mode, mode
from .op import Condition, Formula, Kernel, Op
from .tensor import Tensor


def run(op: Op, values: dict[str, Any]) -> Any:
    """Runs `op` on bound `values`; returns a Tensor, or a tuple of them for an op with several outputs."""
    m = mode()
    arrays, tensors = _unwrap(op, values)
    backend = _backend(op, tensors, m)
    wanted = _wanted(op, tensors) if m.grad else ()
    kernel = _choose(op, arrays, backend, m)
    if op.composite and (kernel is None or not _covers(op, wanted)):
        return _observed(op, m, lambda: op.fn(**values))
    for hook in m.hooks:
        hook.before(op.name, "forward")
    result = _computed(op, kernel, arrays, backend)
    outputs, aux = _split(op, result)
    for hook in m.hooks:
        hook.after(op.name, "forward", outputs)
    node = None
    if wanted and any(is_float(o.dtype) for o in outputs):
        node = _record(op, kernel, wanted, arrays, tensors, outputs, aux, backend, m)
    wrapped = tuple(Tensor._from_op(o, node, i) for i, o in enumerate(outputs))
    return wrapped if op.multiple else wrapped[0]


def explain(op: Op, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    """Each implementation of `op` on these inputs with "chosen" or the reason it was passed over."""
    arrays, tensors = _unwrap(op, op.bind(args, kwargs))
    backend = _backend(op, tensors, mode())
    rows, taken = [], False
    for k in op.kernels:
        verdict = "needs a GPU" if backend.kernels is None else _declined(k.when, arrays)
        rows.append((k.impl, "not needed" if taken and not verdict else verdict or "chosen"))
        taken = taken or not verdict
    return [*rows, ("reference", "passed over: a kernel was chosen" if taken else "chosen")]


def _unwrap(op: Op, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """The call with arrays in place of Tensors, and the Tensors by argument."""
    arrays, tensors = dict(values), {}
    for name in op.tensor_names:
        v = values[name]
        if isinstance(v, Tensor):
            arrays[name], tensors[name] = v.data, [v]
        elif name in op.list_names:
            tensors[name] = [_expect_tensor(op, name, t) for t in v]
            arrays[name] = [t.data for t in tensors[name]]
        elif v is not None and not isinstance(v, (bool, int, float)):
            _expect_tensor(op, name, v)
    return arrays, tensors


def _expect_tensor(op: Op, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{op.name}: expected a Tensor for {name!r}, got {type(value).__name__}; wrap it with engine.tensor()"
        )
    return value


def _backend(op: Op, tensors: dict[str, list[Tensor]], m: Mode) -> Backend:
    found = {t.device for ts in tensors.values() for t in ts}
    if len(found) > 1:
        where = ", ".join(f"{n} on {t.device}" for n, ts in tensors.items() for t in ts)
        raise RuntimeError(f"{op.name}: expected all tensors on one device, got {where}; move them with .to(device)")
    return get_backend(found.pop() if found else m.device)


def _wanted(op: Op, tensors: dict[str, list[Tensor]]) -> tuple[str, ...]:
    return tuple(n for n, ts in tensors.items() if n not in op.undifferentiable and any(t.requires_grad for t in ts))


def _declined(when: Condition | None, arrays: dict[str, Any]) -> str:
    """Why a kernel cannot take these inputs; empty when it can."""
    return when.against(arrays) if when else ""


def _choose(op: Op, arrays: dict[str, Any], backend: Backend, m: Mode) -> Kernel | None:
    forced = m.forced.get(op.name)
    if forced == "reference" or (backend.kernels is None and forced is None):
        return None
    reasons = []
    for kernel in op.kernels:
        if forced not in (None, kernel.impl):
            continue
        reason = "it needs a GPU" if backend.kernels is None else _declined(kernel.when, arrays)
        if not reason:
            return kernel
        reasons.append(reason)
    if forced is None:
        return None
    if not reasons:
        raise RuntimeError(f"{op.name}: no implementation named {forced!r}; has {[k.impl for k in op.kernels]}")
    raise RuntimeError(f"{op.name}: implementation {forced!r} was asked for but cannot run: {'; '.join(reasons)}")


def _covers(op: Op, wanted: Sequence[str]) -> bool:
    """True if a composite's kernels have a gradient for all that is wanted; its body has one for everything."""
    return all(any(arg in f.args for f in op.kernel_formulas) for arg in wanted)


def _computed(op: Op, kernel: Kernel | None, arrays: dict[str, Any], backend: Backend) -> Any:
    """The op's result. What the array library says of shapes is said again in the op's terms."""
    try:
        return kernel.fn(backend.kernels, **arrays) if kernel else _reference(op, arrays, backend)
    except AxisError as e:
        raise ShapeError(f"{op.name}: dim {e.axis} is outside a tensor of {e.ndim} dims") from e
    except ValueError as e:
        if "broadcast" not in str(e):
            raise
        shapes = [f"{n} {tuple(arrays[n].shape)}" for n in op.tensor_names if hasattr(arrays[n], "shape")]
        raise ShapeError(f"{op.name}: the shapes of {', '.join(shapes)} do not broadcast together") from e


def _reference(op: Op, arrays: dict[str, Any], backend: Backend) -> Any:
    if op.moves:
        return op.fn(backend.references, **arrays)
    result_dtype = promote([a.dtype for a in _floats(op, arrays)])
    if result_dtype is None:
        return _whole(op, op.fn(backend.references, **arrays))
    work = compute_dtype(result_dtype)
    raised = {n: (_raise(v, work) if n in op.tensor_names else v) for n, v in arrays.items()}
    result = op.fn(backend.references, **raised)
    outputs, aux = _split(op, result)
    rounded = [o.astype(result_dtype) if is_float(o.dtype) and o.dtype != result_dtype else o for o in outputs]
    head = tuple(rounded) if op.multiple else rounded[0]
    return (head, *aux.values()) if op.aux else head


def _whole(op: Op, result: Any) -> Any:
    """What an op made of whole numbers or truth values: fractions among it are fp32, as in PyTorch."""
    outputs, aux = _split(op, result)
    outputs = [o.astype(float32) if o.dtype == float64 else o for o in outputs]
    head = tuple(outputs) if op.multiple else outputs[0]
    return (head, *aux.values()) if op.aux else head


def _floats(op: Op, arrays: dict[str, Any]) -> list[Array]:
    flat = [a for n in op.tensor_names for a in (arrays[n] if n in op.list_names else [arrays[n]])]
    return [a for a in flat if hasattr(a, "dtype") and is_float(a.dtype)]


def _raise(value: Any, work: DType) -> Any:
    if isinstance(value, list):
        return [_raise(v, work) for v in value]
    if hasattr(value, "dtype") and is_float(value.dtype) and value.dtype != work:
        return value.astype(work)
    return value


def _split(op: Op, result: Any) -> tuple[list[Array], dict[str, Array]]:
    head, aux = (result[0], dict(zip(op.aux, result[1:], strict=True))) if op.aux else (result, {})
    outputs = list(head) if op.multiple else [head]
    return [np.asarray(o) if isinstance(o, np.generic) else o for o in outputs], aux


def _record(
    op: Op, kernel: Kernel | None, wanted: Sequence[str], arrays: dict[str, Any], tensors: dict[str, list[Tensor]],
    outputs: list[Array], aux: dict[str, Array], backend: Backend, m: Mode,
) -> Node:  # fmt: skip
    """The graph node: which formulas will run, and exactly the values they name."""
    formulas = _plan(op, kernel, wanted, arrays, backend, m)
    known = {**arrays, **_again(op, tensors), **aux, "out": outputs if op.multiple else outputs[0]}
    saved = {name: _saved(known, name) for f in formulas for name in f.names}
    edges = [
        Edge.to(t, name, i if name in op.list_names else None)
        for name in wanted
        for i, t in enumerate(tensors[name])
        if t.requires_grad
    ]
    return Node(op, tuple(formulas), saved, edges, [(o.shape, o.dtype) for o in outputs], backend)


def _again(op: Op, tensors: dict[str, list[Tensor]]) -> dict[str, Any]:
    """The arguments that are made again rather than kept, by name."""
    kept = {n: [t.data if t._again is None else t._again for t in ts] for n, ts in tensors.items()}
    return {n: ts if n in op.list_names else ts[0] for n, ts in kept.items()}


def _saved(known: dict[str, Any], name: str) -> Any:
    """The value a formula asks for by name, or the shape of one."""
    if name in known:
        return known[name]
    value = known[name.removesuffix("_shape")]
    return [v.shape for v in value] if isinstance(value, list) else value.shape


def _plan(
    op: Op, kernel: Kernel | None, wanted: Sequence[str], arrays: dict[str, Any], backend: Backend, m: Mode
) -> list[Formula]:
    """One formula for each wanted argument: a kernel's where it can, the reference's otherwise."""
    usable = []
    if backend.kernels is not None and m.forced.get(op.name) != "reference" and (kernel or not op.composite):
        usable = [f for f in op.kernel_formulas if not _declined(f.when, arrays)]
    chosen: list[Formula] = []
    for arg in wanted:
        formula = op.formula_for(arg, [*usable, *op.formulas])
        if formula not in chosen:
            chosen.append(formula)
    return chosen


def _observed(op: Op, m: Mode, body: Any) -> Any:
    """A composite's body: its parts report themselves, so only its name is announced."""
    for hook in m.hooks:
        hook.before(op.name, "body")
    return body()
