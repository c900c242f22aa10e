"""Tensors as the row and reduction kernels take them: as rows of their last dims, as shared rows, or to be reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...autograd.grad_target import GradTarget
from ...backend.cuda.codegen.kernel_ir import Extent, Operands, Program, Reduction, Table
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, bool_, float32
from .conditions import floating
from .dims import Shape

_ELEMENTS = 16384  # the longest row whose operands fit into the registers of a block

_FEW = 8  # places to sum over that an elementwise kernel reads as operands


def rows_of(k: Launcher, x: Array) -> Array:
    """Returns `x` as dense rows (R, C) of its last dim."""
    return k.contiguous(x).reshape(-1, x.shape[-1])


def rows_at(k: Launcher, x: Array, dims: int = 1) -> Array:
    """Returns `x` as rows (..., C) of its last `dims` dims: a view, or a copy where rows are not dense."""
    return _as_rows(x if _dense_rows(x, dims) else k.contiguous(x), dims)


def _as_rows(x: Array, dims: int) -> Array:
    first = x.ndim - dims
    return x.reshape(*(x.shape[:first] or (1,)), math.prod(x.shape[first:]))


def _dense_rows(x: Array, dims: int) -> bool:
    lead = [s for n, s in zip(x.shape[:-dims], x.strides[:-dims], strict=True) if n > 1]
    if math.prod(x.shape[-dims:]) % 2 == 0 and any(at // x.itemsize % 2 for at in (x.data.ptr, *lead)):
        return False  # `rotate_every_two` needs both elements of a pair in one packet
    step: int = x.itemsize
    for n, stride in zip(x.shape[: -dims - 1 : -1], x.strides[: -dims - 1 : -1], strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def row_program(
    k: Launcher, program: Program, operands: Operands, dtype: DType, shape: Shape, dims: int, out: Array | None = None
) -> Array:
    """Returns the result of a program with one output, in `shape`, whose last `dims` dims are a row.

    It is written to `out` if that is given and its rows are dense.

    Args:
        program: with one output.
        dims: the number of last dims that make a row.
    """
    if out is not None and _dense_rows(out, dims):
        k.rows(program, operands, (dtype,), (_as_rows(out, dims),))
        return out
    return k.rows(program, operands, (dtype,))[0].reshape(shape)


def row_program_with_sums(
    k: Launcher,
    program: Program,
    sums: Sequence[str],
    operands: Operands,
    like: Array,
    dims: int = 1,
    out: Array | None = None,
    groups: int = 1,
    summed: DType = float32,
) -> tuple[Array | None, list[Array]]:
    """Runs `row_program` for a result like `like`, and sums (groups, C) of expressions over groups of rows.

    The result is None if the program has no output. Groups are of equal length and follow one another. Sums are of the
    dtype `summed`, or in fp32.

    Args:
        program: with one output, or none.
        sums: expressions to sum.
        operands: what both read.
        like: has the result's shape and dtype.
        dims: the number of last dims that make a row.
        groups: how many groups of rows have sums of their own.
        summed: the sums' dtype.

    Returns:
        The result, and the sums.
    """
    if not sums:
        return row_program(k, program, operands, like.dtype, like.shape, dims, out), []
    given = (_as_rows(out, dims),) if program.rows and out is not None and _dense_rows(out, dims) else ()
    dtypes = (like.dtype,) * len(program.rows)
    made, totals = k.row_sums(program, sums, operands, dtypes, given, groups, summed)
    return (out if given else made[0].reshape(like.shape)) if made else None, totals


def why_not_rows(x: Array, dims: int, *others: Array | None) -> str:
    """Says why row kernels cannot take `x` as rows of its last `dims` dims, together with `others`; "" if they can."""
    reason = floating(x, *others)
    if reason:
        return reason
    if x.dtype == bool_ or x.size == 0:
        return "nothing to compute with"
    columns = math.prod(x.shape[x.ndim - dims :])
    limit = min(_ELEMENTS, 4096 * math.gcd(columns, 16 // x.dtype.itemsize))
    if columns == 1:
        return "rows of one element"
    return "" if columns <= limit else f"rows of {columns} are longer than {limit}"


def shared(x: Array, shape: Shape) -> tuple[int, int] | None:
    """Returns `Table`'s (run, count) for the rows of `x` broadcast to `shape`; None if they follow another pattern."""
    own = (*[1] * (len(shape) - x.ndim), *x.shape)
    if own[-1] != shape[-1] or len(own) != len(shape):
        return None
    lead = shape[:-1]
    real = [i for i, n in enumerate(own[:-1]) if n != 1]
    if not real:
        return math.prod(lead), 1
    first, last = real[0], real[-1]
    if own[first : last + 1] != lead[first : last + 1]:
        return None
    return math.prod(lead[last + 1 :]), math.prod(lead[first : last + 1])


def table(k: Launcher, x: Array, shape: Shape) -> Table:
    """Returns `x` as rows shared among those of `shape`; `shared` must not be None for these."""
    found = shared(x, shape)
    assert found is not None
    return Table(rows_of(k, x), *found)


def one_row(k: Launcher, **given: Array | None) -> dict[str, Table]:
    """Returns the given arrays that are not None, each as one row that all rows share: a weight and a bias."""
    return {n: Table(k.contiguous(a).reshape(1, -1)) for n, a in given.items() if a is not None}


def target_rows(k: Launcher, target: GradTarget, dims: int) -> tuple[dict[str, Array], str, Array | None]:
    """Says how a row kernel serves a target: an operand `addend`, the text that adds it, and memory for the result."""
    if target.addend is None:
        return {}, "", target.buffer
    return {"addend": rows_at(k, target.addend, dims)}, " + addend", None


def extent(shape: Shape, dims: Sequence[int]) -> Extent | None:
    """Returns the sizes of a reduction over `dims`; None if other dims lie between them."""
    real = sorted(d for d in dims if shape[d] != 1)
    if not real:
        return Extent(math.prod(shape), 1, 1)
    first, last = real[0], real[-1]
    if any(shape[d] != 1 and d not in real for d in range(first, last + 1)):
        return None
    return Extent(math.prod(shape[:first]), math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :]))


def why_not_reduction(x: Array, dims: Sequence[int]) -> str:
    """Says why the reduction kernels cannot take `x` over `dims`; "" if they can."""
    if reason := floating(x):
        return reason
    if x.dtype == bool_ or x.size == 0:
        return "nothing to compute with"
    return "" if extent(x.shape, dims) else "the dims are not neighbours"


def reduced_rows(k: Launcher, x: Array, dims: Sequence[int]) -> Array | None:
    """Returns `x` as dense rows, each reduced to one number over `dims`; None if row kernels cannot take them."""
    e = extent(x.shape, dims)
    if e is None or e.inner != 1 or why_not_rows(x, x.ndim - min(dims)):
        return None
    rows: Array = k.contiguous(x).reshape(e.outer, e.reduced)
    return rows


def reduce(
    k: Launcher,
    reduction: Reduction,
    operands: dict[str, Array],
    dims: Sequence[int],
    dtype: DType,
    *,
    each: dict[str, Array] | None = None,
    numbers: dict[str, float] | None = None,
) -> Array:
    """Computes `reduction` over `dims` of operands of one shape; those dims are kept with size 1.

    `each` are operands of the result's shape: one output's inputs share an element.

    Args:
        reduction: what is computed.
        operands: arrays of one shape, by name.
        dims: the dimensions that are reduced.
        each: arrays of the result's shape, by name.
        numbers: the constants of the reduction, by name.

    Returns:
        The result.
    """
    shape = next(iter(operands.values())).shape
    e = extent(shape, dims)
    assert e is not None
    flat = (e.outer * e.reduced, e.inner) if e.inner > 1 else (e.outer, e.reduced)
    rows = {n: k.contiguous(a).reshape(flat) for n, a in operands.items()}
    kept = {n: k.contiguous(a).reshape(e.outer, e.inner) for n, a in (each or {}).items()}
    given = (
        Operands(rows, {n: Table(a, e.reduced, e.outer) for n, a in kept.items()}, {}, numbers or {})
        if e.inner > 1
        else Operands(rows, {}, {n: a.reshape(-1) for n, a in kept.items()}, numbers or {})
    )
    done = k.columns([reduction], given, e, dtype)[0]
    return done.reshape([1 if i in dims else n for i, n in enumerate(shape)])


def summed(
    k: Launcher,
    value: str,
    operands: dict[str, Array],
    dims: Sequence[int],
    dtype: DType,
    numbers: dict[str, float] | None = None,
) -> Array:
    """Returns the expression `value` summed over `dims`, neighbours or not; those dims are kept with size 1.

    Neighbours are summed in one pass, from the last ones on, in fp32 between passes.

    Args:
        value: an expression over the operands.
        operands: arrays of one shape, by name.
    """
    shape = next(iter(operands.values())).shape
    if extent(shape, dims) is not None:
        return reduce(k, Reduction("sum", value), operands, dims, dtype, numbers=numbers)
    first = last = max(d for d in dims if shape[d] != 1)
    while first - 1 in dims or shape[first - 1] == 1:
        first -= 1
    part = reduce(k, Reduction("sum", value), operands, range(first, last + 1), float32, numbers=numbers)
    return summed(k, "each", {"each": part}, [d for d in dims if d < first], dtype)


def sum_over(k: Launcher, x: Array, dims: Sequence[int]) -> Array:
    """Returns `x` summed over `dims`, which are kept with size 1. Few places are added up as arrays of their own."""
    sizes = [n if i in dims else 1 for i, n in enumerate(x.shape)]
    if math.prod(sizes) > _FEW:
        return summed(k, "each", {"each": x}, dims, x.dtype)
    places = [
        tuple(slice(i, i + 1) if d in dims else slice(None) for d, i in enumerate(at)) for at in np.ndindex(*sizes)
    ]
    parts = {f"x{i}": x[place] for i, place in enumerate(places)}
    return x if len(parts) == 1 else k.elementwise((" + ".join(parts),), parts, (x.dtype,))[0]
