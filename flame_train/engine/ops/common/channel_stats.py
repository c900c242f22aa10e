"""Sums over all dims but the channels', by kernels that see an array as (outer, channels, inner).

Where inner is 1 the sums go down columns. Else each plane of `inner` elements is cut into rows that fit into registers,
and a second launch combines the rows' results.
"""

from __future__ import annotations

import math

from ...backend.cuda.codegen.kernel_ir import Extent, Operands, Program, Reduction, Table
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32
from .conditions import floating
from .dims import Shape
from .row_kernels import reduce

_LONGEST = 4096  # the most packets of a row, and the most rows of a channel
_NEAR = 64  # elements whose mean is taken for an estimate of all elements' mean


def folded(shape: Shape, axes: tuple[int, ...]) -> Shape | None:
    """`shape` as (outer, channels, inner); channels are the dims not in `axes`. None if these are not adjacent."""
    kept = [i for i in range(len(shape)) if i not in axes]
    first, last = kept[0], kept[-1] + 1
    if len(kept) != last - first:
        return None
    outer, channels, inner = math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])
    return (1, 1, outer) if channels == inner == 1 else (outer, channels, inner)


def _parts(inner: int, itemsize: int) -> int:
    """Returns the number of rows that a plane is cut into; 0 if it does not divide."""
    for parts in range(1, 1 + min(inner, _LONGEST)):
        length = inner // parts
        if inner % parts == 0 and length <= min(4 * _LONGEST, _LONGEST * math.gcd(length, 16 // itemsize)):
            return parts
    return 0


def no_planes(shape: Shape, itemsize: int) -> str:
    """Says why the planes of (outer, channels, inner) cannot be summed; "" if they can."""
    outer, _, inner = shape
    if inner == 1:
        return ""
    parts = _parts(inner, itemsize)
    return "" if 0 < parts * outer <= _LONGEST else f"{outer} planes of {inner} elements do not divide into rows"


def _rows(k: Launcher, program: Program, x: dict[str, Array], channels: dict[str, Array]) -> list[Array]:
    """Returns the numbers that `program` computes for each row of the planes, each as (channels, rows of a channel)."""
    outer, count, inner = next(iter(x.values())).shape
    parts = _parts(inner, max(a.itemsize for a in x.values()))
    shape = (outer, count, parts)
    each = {n: k.contiguous(k.xp.broadcast_to(a.reshape(1, -1, 1), shape)).reshape(-1) for n, a in channels.items()}
    rows = {n: a.reshape(-1, inner // parts) for n, a in x.items()}
    made = k.rows(program, Operands(rows, {}, each), (float32,) * len(program.numbers))
    return [k.contiguous(a.reshape(shape).transpose(1, 0, 2)).reshape(count, -1) for a in made]


_PLANE = Program(
    ("sum s = input", "let mean = s / n", "sum square = (input - mean) * (input - mean)"), (), ("mean", "square")
)
_PLANES = Program(
    ("sum s = mean", "let middle = s / n", "sum total = square + each * (mean - middle) * (mean - middle)"),
    (),
    ("middle", "total / (n * each)"),
)


def statistics(k: Launcher, x: Array) -> tuple[Array, Array]:
    """Returns mean and variance of each channel of (outer, channels, inner), fp32, in one pass over `x`.

    The kernels sum differences from the mean of a column's first elements or of a row's own. So little
    precision is lost where all values are far from zero.
    """
    outer, channels, inner = x.shape
    if inner > 1:
        mean, square = _rows(k, _PLANE, {"input": x}, {})
        each = outer * inner / mean.shape[1]
        found: tuple[Array, Array] = k.rows(
            _PLANES, Operands({"mean": mean, "square": square}, numbers={"each": each}), (float32, float32)
        )
        return found
    flat = x.reshape(outer, channels)
    near = flat[:_NEAR]
    first = k.columns(
        [Reduction("sum", "input", "total / n")], Operands({"input": near}), Extent(1, *near.shape), float32
    )
    sums = [Reduction("sum", v, "total / n") for v in ("input - first", "(input - first) * (input - first)")]
    tables = {"first": Table(first[0])}
    far, square = k.columns(sums, Operands({"input": flat}, tables), Extent(1, *flat.shape), float32)
    operands = {"first": first[0][0], "far": far[0], "square": square[0]}
    mean, var = k.elementwise(("first + far", "fmaxf(square - far * far, 0.f)"), operands, (float32, float32))
    return mean, var


def slopes(k: Launcher, g: Array, x: Array, mean: Array) -> tuple[Array, Array]:
    """For each channel the sums of g and of g * (x - mean), fp32."""
    values = {"a": "g", "b": "g * (input - mean)"}
    outer, channels, inner = x.shape
    if inner > 1:
        steps = tuple(f"sum {n} = {v}" for n, v in values.items())
        parts = _rows(k, Program(steps, (), ("a", "b")), {"g": g, "input": x}, {"mean": mean})
        whole = Program(("sum s = a", "sum t = b"), (), ("s", "t"))
        a, b = k.rows(whole, Operands(dict(zip("ab", parts, strict=True))), (float32, float32))
        return a, b
    rows = {"g": g.reshape(outer, channels), "input": x.reshape(outer, channels)}
    sums = [Reduction("sum", v) for v in values.values()]
    a, b = k.columns(sums, Operands(rows, {"mean": Table(mean.reshape(1, -1))}), Extent(1, outer, channels), float32)
    return a[0], b[0]


def no_planes_of_channels(input: Array, layout: str) -> str:
    """Says why `channel_sums` cannot take gradients of the dtype of `input`; "" if it can."""
    if layout != "NCHW" or input.size == 0:
        return "channels last, or nothing to sum"
    return floating(input)


def channel_sums(k: Launcher, g: Array, layout: str) -> Array:
    """(C,): the sum of images `g` (B, C, ...) over everything but the channels. It is the gradient of a bias.

    Planes are summed one by one and their sums over the images then, in fp32.
    """
    each = k.contiguous(g).reshape(*g.shape[:2], -1)
    planes = reduce(k, Reduction("sum", "each"), {"each": each}, (2,), float32)
    return reduce(k, Reduction("sum", "each"), {"each": planes[..., 0]}, (0,), g.dtype)[0]
