"""Running an op: choosing its implementation, handling precision, recording the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.exceptions import AxisError

from ..errors import ShapeError, kind_of
from .arguments import Guard
from .autograd.graph import Edge, Node, Remat, arrays_in
from .backend import Backend, get_backend, several_gpus
from .dtype import (
    FLOATS,
    Array,
    DType,
    as_array,
    compute_dtype,
    float32,
    float64,
    int64,
    is_float,
    narrowed,
    promote,
    result_type,
)
from .mode import Mode, mode
from .namespace import Namespace
from .op import VJP, Kernel, Op
from .symbolic import Scalar
from .tensors.tensor import Tensor


def split_results(op: Op, result: Any) -> tuple[list[Array], dict[str, Array]]:
    """The outputs as a list, and the `aux` values by name. Raises TypeError for what the op does not declare."""
    if isinstance(result, (tuple, list)) != (op.multiple or bool(op.aux)):
        raise _misdeclared(op, result)
    head, aux = (result[0], result[1:]) if op.aux else (result, ())
    outputs = [as_array(o) for o in (head if op.multiple else (head,))]
    if len(aux) != len(op.aux) or not all(hasattr(o, "dtype") for o in outputs):
        raise _misdeclared(op, result)
    return outputs, dict(zip(op.aux, aux, strict=True))


def _misdeclared(op: Op, result: Any) -> TypeError:
    came = kind_of(result)
    if isinstance(result, (tuple, list)):
        came = f"a {came} of {', '.join(map(kind_of, result)) or 'nothing'}"
    if op.aux:
        wanted = f"a tuple of the result{'s' * op.multiple} and of {', '.join(op.aux)}, as aux says"
    elif op.multiple:
        wanted = "a tuple of arrays, as multiple=True says"
    else:
        wanted = "an array; declare several results by multiple=True, values for the gradient by aux=(their names,)"
    return TypeError(f"{op.name}: its function returned {came}; expected {wanted}")


def run_body(op: Op, m: Mode, values: dict[str, Any]) -> Any:
    """Returns what the body makes of bound `values`. Hooks hear the composite's name: the ops inside report themselves.

    Raises ShapeError as "normalize, in norm: ...", and all else that the body raises.
    """
    for hook in m.hooks:
        hook.before(op.name, "body", [])
    try:
        return op.fn(**values)
    except ShapeError as e:
        raise named(op, e) from e.__cause__


def named(op: Op, error: ShapeError) -> ShapeError:
    """Returns the error of a composite: with its name before that of the op inside, if the error begins with one."""
    inner = str(error).partition(":")[0].partition(",")[0]
    if inner == op.name or not inner.isidentifier():
        return error
    return ShapeError(f"{op.name}, in {error}")


_FROM_INTEGERS = {float64: float32, np.dtype(np.uint64): int64}
"""NumPy's result dtypes of integer inputs to PyTorch's: NumPy divides in fp64, and sums unsigned integers in uint64."""

Used = tuple[str, int | None, Tensor]
"""A Tensor of a call: the argument's name, the index in it if it is a list, the Tensor."""


def run(op: Op, values: dict[str, Any]) -> Any:
    """Runs `op` on bound `values`; returns a Tensor, or a tuple of them for an op with several outputs.

    Raises `TypeError` for an argument that is no Tensor, `RuntimeError` for tensors on different devices or a forced
    implementation that cannot run. Raises `ShapeError` for shapes that do not fit, `Unsupported` where no gradient is
    known.
    """
    if op.batched_dims and getattr(values["input"], "ndim", 0) == op.batched_dims - 1:
        made = run(op, values | {"input": values["input"].unsqueeze(0)})
        return tuple(t.squeeze(0) for t in made) if isinstance(made, tuple) else made.squeeze(0)
    m = mode()
    try:
        arrays, used = _unwrap(op, values)
    except TypeError:
        for v in values.values():
            if isinstance(v, Scalar):  # a function that is being traced called the op
                return v.apply_op(op.name, values)
        raise
    backend = _backend(op, used, m)
    arrays = _fit(op, arrays, backend)
    wanted = [u for u in used if u[2].requires_grad and u[0] not in op.non_differentiable_names] if m.grad else []
    kernel = _choose(op, arrays, backend, m)
    if op.composite and (kernel is None or not _covers(op, wanted)):
        return run_body(op, m, values)
    for hook in m.hooks:
        hook.before(op.name, "forward", [t.data for _, _, t in used])
    try:
        outputs, aux = _computed(op, kernel, arrays, used, backend)
    except ShapeError as e:
        raise (named(op, e) if op.composite else e) from e.__cause__
    for hook in m.hooks:
        hook.after(op.name, "forward", [*outputs, *arrays_in(aux.values())])
    node = None
    if wanted and any(is_float(o.dtype) for o in outputs):
        node = _record(op, kernel, wanted, arrays, used, outputs, aux, backend, m)
    wrapped = tuple([Tensor._from_op(o, node, i) for i, o in enumerate(outputs)])
    return wrapped if op.multiple else wrapped[0]


Op._run = run


def explain(op: Op, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    """(implementation, "chosen" or why not) for each of `op` on these inputs; "body": it is made of ops that choose."""
    op = _op(op)
    arrays, used = _unwrap(op, op.bind(args, kwargs))
    backend = _backend(op, used, mode())
    return _verdicts(op.kernels, _fit(op, arrays, backend), backend, "body" if op.composite else "reference")


def explain_gradients(op: Op, *args: Any, **kwargs: Any) -> dict[str, list[tuple[str, str]]]:
    """Explains as `explain`, for the gradient of each floating argument that has one, by the argument's name."""
    op = _op(op)
    arrays, used = _unwrap(op, op.bind(args, kwargs))
    backend = _backend(op, used, mode())
    arrays = _fit(op, arrays, backend)
    names = dict.fromkeys(name for name, _, t in used if name in op.differentiable and is_float(t.dtype))
    return {n: _verdicts([f for f in op.kernel_formulas if n in f.args], arrays, backend) for n in names}


def _op(value: Any) -> Op:
    found = getattr(value, "op", value)  # that of an elementwise function
    if not isinstance(found, Op):
        raise TypeError(f"explain: expected an op, such as engine.functional.conv2d, got {kind_of(value)}")
    return found


def _verdicts(
    kernels: Sequence[Kernel | VJP], arrays: dict[str, Any], backend: Backend, last: str = "reference"
) -> list[tuple[str, str]]:
    rows, taken = [], False
    for k in kernels:
        verdict = "needs a GPU" if backend.kernels is None else _declined(k.when, arrays)
        rows.append((k.impl, "not needed" if taken and not verdict else verdict or "chosen"))
        taken = taken or not verdict
    return [*rows, (last, "passed over: a kernel was chosen" if taken else "chosen")]


def _unwrap(op: Op, values: dict[str, Any]) -> tuple[dict[str, Any], list[Used]]:
    """Returns the call with arrays in place of Tensors, cast as the op declares, and the Tensors themselves."""
    arrays = dict(values)
    used: list[Used] = []
    for name in op.tensor_names:
        v = values[name]
        if name in op.list_names:
            used += [(name, i, _expect_tensor(op, name, t)) for i, t in enumerate(_expect_list(op, name, v))]
            arrays[name] = [t.data for t in v]
        elif isinstance(v, Tensor):
            arrays[name] = v.data
            used.append((name, None, v))
        elif name not in op.number_names or not isinstance(v, (bool, int, float)):
            arrays[name] = _expect_number(op, name, v)
    for name, _, t in used:
        if t.data.dtype not in FLOATS and name in op.promoted:
            _promote_integers(op, arrays, used)
            break
    if op.rounds_scalars:
        _round_scalars(op, arrays, used)
    return arrays, used


def _fit(op: Op, arrays: dict[str, Any], backend: Backend) -> dict[str, Any]:
    """Returns the arguments aligned as kernels require (`Launcher.aligned`); as they are if no kernel can run."""
    if backend.kernels is None or not op.kernels:
        return arrays
    return {n: backend.kernels.aligned(v) if n in op.tensor_names else v for n, v in arrays.items()}


def _promote_integers(op: Op, arrays: dict[str, Any], used: list[Used]) -> None:
    """Casts integer and boolean arguments to floats, except those the op takes as they are."""
    work = result_type([t.data for _, _, t in used]) or float32
    for name in op.promoted.intersection([name for name, _, _ in used]):
        v = arrays[name]
        arrays[name] = [_as_float(a, work) for a in v] if name in op.list_names else _as_float(v, work)


def _as_float(array: Array, dtype: DType) -> Array:
    return array if is_float(array.dtype) else array.astype(dtype)


def _round_scalars(op: Op, arrays: dict[str, Any], used: list[Used]) -> None:
    """Rounds numbers and 0-d tensors to the dtype of the tensors they are compared with, as PyTorch does."""
    dtype = result_type([t.data for _, _, t in used])
    for name in op.tensor_names:
        value = arrays[name]
        if dtype is not None and isinstance(value, (int, float)):
            with np.errstate(over="ignore"):
                arrays[name] = float(np.asarray(value, float64).astype(dtype))
        elif dtype is not None and value is not None and not value.ndim and is_float(value.dtype):
            arrays[name] = value.astype(dtype, copy=False)


def _expect_tensor(op: Op, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{op.name}: expected a Tensor for {name!r}, got {kind_of(value)}; wrap it with engine.tensor()"
        )
    return value


def _expect_list(op: Op, name: str, value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{op.name}: expected a list or tuple of Tensors for {name!r}, got {kind_of(value)}")
    return value


def _expect_number(op: Op, name: str, value: Any) -> Any:
    """Returns a number as it is passed on, a NumPy scalar as Python's, which widens nothing. Raises TypeError."""
    if value is None and name in op.optional_names:
        return None
    if name in op.number_names and isinstance(value, np.generic):
        return value.item()
    wanted = "a Tensor or a number" if name in op.number_names else "a Tensor"
    what = "None" if value is None else f"{kind_of(value)}; wrap it with engine.tensor()"
    raise TypeError(f"{op.name}: expected {wanted} for {name!r}, got {what}")


def _backend(op: Op, used: list[Used], m: Mode) -> Backend:
    """Returns the one backend all tensors are on; the mode's for an empty list of tensors."""
    if not used:
        if not op.list_names:
            raise TypeError(f"{op.name}: expected at least one Tensor, got none")
        return get_backend(m.device)
    mixed = several_gpus() or len({type(t.data) for _, _, t in used}) > 1
    if mixed and len({t.device for _, _, t in used}) > 1:
        where = ", ".join([f"{name} on {t.device}" for name, _, t in used])
        raise RuntimeError(f"{op.name}: expected all tensors on one device, got {where}; move them with .to(device)")
    return used[0][2].backend


def _declined(when: Guard | None, arrays: dict[str, Any]) -> str:
    """Says why a kernel cannot take these inputs; "" if it can."""
    return when.rejection(arrays) if when else ""


def _choose(op: Op, arrays: dict[str, Any], backend: Backend, m: Mode) -> Kernel | None:
    """Returns the forced kernel, or the first that takes these inputs; None for the reference."""
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
    raise RuntimeError(f"{op.name}: implementation {forced!r} was requested but cannot run: {'; '.join(reasons)}")


def _covers(op: Op, wanted: list[Used]) -> bool:
    """Says whether a composite's kernels have a gradient for every wanted argument; else its body must run."""
    return all(any(name in f.args for f in op.kernel_formulas) for name, _, _ in wanted)


def _computed(
    op: Op, kernel: Kernel | None, arrays: dict[str, Any], used: list[Used], backend: Backend
) -> tuple[list[Array], dict[str, Array]]:
    """Returns outputs and `aux` values; the array library's errors about shapes become errors in the op's terms."""
    try:
        if kernel is not None:
            return split_results(op, kernel.fn(backend.kernels, **{n: arrays[n] for n in kernel.names}))
        return _reference(op, arrays, used, backend)
    except AxisError as e:
        raise ShapeError(f"{op.name}: dim {e.axis} is outside a tensor of {e.ndim} dims") from e
    except ValueError as e:
        if "broadcast" not in str(e):
            raise
        shapes = [f"{n} {tuple(arrays[n].shape)}" for n in op.tensor_names if hasattr(arrays[n], "shape")]
        raise ShapeError(f"{op.name}: the shapes of {', '.join(shapes)} do not broadcast together") from e


@np.errstate(all="ignore")
def _reference(
    op: Op, arrays: dict[str, Any], used: list[Used], backend: Backend
) -> tuple[list[Array], dict[str, Array]]:
    """Runs the reference in fp32 or fp64, and rounds the outputs to the inputs' dtype."""
    if op.data_movement:
        return split_results(op, op.fn(backend.references, **arrays))
    dtypes = {t.data.dtype for _, _, t in used}
    result = promote(dtypes) if len(dtypes) < 2 else result_type([t.data for _, _, t in used])
    if result is None:  # integers and booleans only
        if len(dtypes) > 1 and not op.rounds_scalars:
            arrays = arrays | narrowed({n: t.data for n, i, t in used if i is None})
        outputs, aux = split_results(op, op.fn(backend.references, **arrays))
        return [o.astype(_FROM_INTEGERS.get(o.dtype, o.dtype), copy=False) for o in outputs], aux
    work = compute_dtype(result)
    if dtypes != {work}:
        arrays = {n: (_raise(v, work) if n in op.tensor_names else v) for n, v in arrays.items()}
    outputs, aux = split_results(op, op.fn(backend.references, **arrays))
    return [o.astype(result) if o.dtype != result and is_float(o.dtype) else o for o in outputs], aux


def _raise(value: Any, work: DType) -> Any:
    if isinstance(value, list):
        return [_raise(v, work) for v in value]
    if hasattr(value, "dtype") and is_float(value.dtype) and value.dtype != work:
        return value.astype(work)
    return value


def _record(
    op: Op,
    kernel: Kernel | None,
    wanted: list[Used],
    arrays: dict[str, Any],
    used: list[Used],
    outputs: list[Array],
    aux: dict[str, Array],
    backend: Backend,
    m: Mode,
) -> Node:
    """Returns the graph node: the formulas that will run, the values they name, and an edge to each input."""
    formulas = _plan(op, kernel, dict.fromkeys([name for name, _, _ in wanted]), arrays, backend, m)
    known = {**arrays, **aux, "out": outputs if op.multiple else outputs[0]}
    for name, i, t in used:
        if t._remat is not None:
            _put_remat(known, name, i, t._remat)
    saved = {name: known[name] if name in known else _shape(known, name) for f in formulas for name in f.names}
    edges = [Edge(t, name, i) for name, i, t in wanted]
    views = partial(_split_views, op, backend.xp, {n: arrays[n] for n in op.names[1:]}) if op.views else None
    shapes = [(o.shape, o.dtype) for o in outputs]
    return Node(op.name, tuple(formulas), saved, edges, shapes, backend, multiple=op.multiple, split_views=views)


def _split_views(op: Op, xp: Namespace, attributes: dict[str, Any], whole: Array) -> list[Array]:
    """Returns the views of `whole`, an array of the input's shape, that correspond to the outputs of a `views` op."""
    return split_results(op, op.fn(xp, whole, **attributes))[0]


def _put_remat(known: dict[str, Any], name: str, i: int | None, remat: Remat) -> None:
    """Replaces an argument's values, or those of item `i` of a list, by how to recompute them."""
    if i is None:
        known[name] = remat
    else:
        known[name] = [*known[name][:i], remat, *known[name][i + 1 :]]


def _shape(known: dict[str, Any], name: str) -> Any:
    """Returns the value of a formula's parameter `<argument>_shape`; a list of shapes for a list of tensors."""
    value = known[name.removesuffix("_shape")]
    return [v.shape for v in value] if isinstance(value, list) else value.shape


def _plan(
    op: Op, kernel: Kernel | None, wanted: Iterable[str], arrays: dict[str, Any], backend: Backend, m: Mode
) -> list[VJP]:
    """Returns the formulas that cover the wanted arguments: a kernel's where one takes these inputs."""
    candidates = op.formulas
    if backend.kernels is not None and m.forced.get(op.name) != "reference" and (kernel or not op.composite):
        met = kernel.when if kernel else None  # the forward kernel's condition is known to hold
        candidates = [f for f in op.kernel_formulas if f.when is met or not _declined(f.when, arrays)] + op.formulas
    chosen: list[VJP] = []
    for arg in wanted:
        formula = op.formula_for(arg, candidates)
        if formula not in chosen:
            chosen.append(formula)
    return chosen
