"""Layers with a low-rank update: W x + scale * up (down x) (LoRA, arXiv 2106.09685).

The factors have the activations' dtype; the gradients of working copies are fp32 all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array, compute_dtype, float32
from ..graph import Held, Into, Plus
from ..op import ErrorSample, Sample, composite, primitive, sample
from ..tensor import Tensor
from . import conditions
from .conv import Pair, conv2d
from .matmul import check_linear, linear_condition, rows_product


@primitive(aux=("low",))
def lora_linear(
    xp: Any, input: Array, weight: Array, bias: Array | None, down: Array, up: Array, scale: float,
    residual: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """linear(input, weight, bias) + (scale * input @ down^T) @ up^T, and the residual, of the same shape, if given"""
    _check(input, weight, residual)
    low = rows_product(xp, input, down.T) * scale
    y = rows_product(xp, input, weight.T)
    for term in (bias, residual):
        y = y if term is None else y + term
    return y + rows_product(xp, low, up.T), low


def _check(input: Array, weight: Array, residual: Array | None) -> None:
    check_linear(input, weight)
    if residual is not None and residual.shape != (*input.shape[:-1], weight.shape[0]):
        raise ShapeError(f"lora_linear: expected a residual of the result's shape, got {tuple(residual.shape)}")


@lora_linear.vjp("input", "down", "up")
def _(
    xp: Any, g: Array, input: Array, weight: Array, down: Array, up: Array, low: Array, scale: float,
    needs: frozenset[str],
) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
    rows, x = g.reshape(-1, g.shape[-1]), input.reshape(-1, input.shape[-1])
    inner = xp.matmul(rows, up) * scale
    dx = (xp.matmul(rows, weight) + xp.matmul(inner, down)).reshape(input.shape) if "input" in needs else None
    d_down = xp.matmul(inner.T, x) if "down" in needs else None
    return dx, d_down, xp.matmul(rows.T, low.reshape(-1, low.shape[-1])) if "up" in needs else None


@lora_linear.vjp("weight")
def _(xp: Any, g: Array, input: Array) -> Array:
    return xp.matmul(g.reshape(-1, g.shape[-1]).T, input.reshape(-1, input.shape[-1]))


@lora_linear.vjp("bias")
def _(xp: Any, g: Array) -> Array:
    return g


@lora_linear.vjp("residual")
def _(xp: Any, g: Array) -> Array:
    return g


@lora_linear.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 7), (6, 8), None, (2, 8), (6, 2), 0.5), ShapeError, "last dim 7 but weight is")
    bad = sample((2, 8), (6, 8), None, (2, 8), (6, 2), 0.5, (6,))
    yield ErrorSample(bad, ShapeError, r"a residual of the result's shape, got \(6,\)")


@lora_linear.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 8), (6, 8), (6,), (2, 8), (6, 2), 0.5)
    yield sample((4, 8), (6, 8), None, (1, 8), (6, 1), 2.0)
    yield sample((2, 3, 8), (6, 8), (6,), (2, 8), (6, 2), 0.5, (2, 3, 6))


def _lora_condition(
    input: Array, weight: Array, bias: Array | None, down: Array, up: Array, residual: Array | None
) -> str:  # fmt: skip
    return linear_condition(input, weight, bias) or conditions.same(conditions.ANY_FLOAT, input, down, up, residual)


@lora_linear.cuda("cublaslt", when=_lora_condition)
def _(
    k: Any, input: Array, weight: Array, bias: Array | None, down: Array, up: Array, scale: float,
    residual: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    _check(input, weight, residual)
    return k.low_rank(input, weight.T, down.T, up.T, scale, bias=bias, plus=residual)


@lora_linear.cuda_vjp("cublaslt", "input", "down", "up", when=_lora_condition)
def _(
    k: Any, g: Array, input: Array, weight: Array, down: Array, up: Array, low: Array, scale: float,
    needs: frozenset[str], plus: Plus, into: Into,
) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
    g, input = k.even(g), k.even(input)
    rows, x = (a.reshape(-1, a.shape[-1]) for a in (g, input))
    if "input" in needs:
        place = _place(plus.get("input"), into.get("input"))
        dx, inner = k.low_rank(g, weight, up, down, scale, **place)
    else:
        dx, inner = None, k.matmul(rows, up, alpha=scale)
    wanted: dict[str, list[Held] | None] = {n: _listed(plus.get(n)) for n in ("down", "up") if n in needs}
    made = _factor_gradients(k, _Thin(x, rows[:, None], inner, low.reshape(len(x), -1), len(down)), wanted)
    return dx, made["down"][0] if "down" in made else None, made["up"][0] if "up" in made else None


def _place(held: Held | None, into: Array | None = None) -> dict[str, Array | None]:
    """Where the input's gradient goes and what it is added to, as by `added_product`."""
    if held is None:
        return {"out": into if into is not None and into.flags.c_contiguous else None}
    return {"out": held.array if held.owned else None, "plus": held.array}


@lora_linear.cuda_vjp("cublaslt", "residual", when=_lora_condition)
def _(k: Any, g: Array) -> Array:
    return g


# ---- several layers of one input ---------------------------------------------------------------------------


@composite(aux=("low",), multiple=True)
def lora_linears(
    input: Tensor, weights: Sequence[Tensor], downs: Sequence[Tensor], ups: Sequence[Tensor], scale: float
) -> tuple[Tensor, ...]:
    """lora_linear(input, weights[i], None, downs[i], ups[i], scale) for each i: queries, keys and values at once"""
    if not len(weights) == len(downs) == len(ups):
        raise ShapeError(f"lora_linears: {len(weights)} weights, {len(downs)} downs and {len(ups)} ups do not pair up")
    parts = zip(weights, downs, ups, strict=True)
    return tuple(lora_linear(input, w, None, d, u, scale) for w, d, u in parts)


@lora_linears.errors
def _() -> Iterator[ErrorSample]:
    pair = [(6, 8), (6, 8)]
    yield ErrorSample(sample((2, 8), pair, [(2, 8)], [(6, 2)], 0.5), ShapeError, "2 weights, 1 downs and 1 ups")


@lora_linears.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 8), [(6, 8), (6, 8)], [(2, 8), (2, 8)], [(6, 2), (6, 2)], 0.5)
    yield sample((4, 8), [(6, 8)], [(1, 8)], [(6, 1)], 2.0)
    yield sample((2, 8), [(6, 8), (4, 8)], [(2, 8), (1, 8)], [(6, 2), (4, 1)], 0.5)


def _stack_condition(input: Array, weights: Sequence[Array], downs: Sequence[Array], ups: Sequence[Array]) -> str:
    for what in (weights, downs, ups):
        if len({(w.shape, w.dtype) for w in what}) > 1 or len(what) != len(weights):
            return "layers of several shapes or dtypes"
    if input.shape[-1] != weights[0].shape[1]:
        return "an input of another width"
    return linear_condition(input, weights[0], None) or conditions.same(conditions.ANY_FLOAT, input, downs[0], ups[0])


def _side_by_side(k: Any, arrays: Sequence[Array]) -> Array:
    """n arrays (..., C) as (rows, n, C): no copy where they are slices of one buffer."""
    flat = k.stacked([a.reshape(-1, a.shape[-1]) for a in arrays])
    return flat.transpose(1, 0, 2)


@lora_linears.cuda("cublaslt", when=_stack_condition)
def _(
    k: Any, input: Array, weights: Sequence[Array], downs: Sequence[Array], ups: Sequence[Array], scale: float
) -> tuple[list[Array], Array]:
    weight, down, up = (k.stacked(what) for what in (weights, downs, ups))
    n, out, width = weight.shape
    x = k.rows_first(input).reshape(-1, width)
    matrices = weight.reshape(-1, width).T, down.reshape(-1, width).T, up.reshape(n * out, -1).T
    y, low = k.low_rank(x, *matrices, scale, parts=n)
    y, shape = y.reshape(-1, n, out), (*input.shape[:-1], out)
    return [y[:, i].reshape(shape) for i in range(n)], low


@lora_linears.cuda_vjp("cublaslt", "input", "downs", "ups", when=_stack_condition)
def _(
    k: Any, g: Sequence[Array], input: Array, weights: Sequence[Array], downs: Sequence[Array], ups: Sequence[Array],
    low: Array, scale: float, needs: frozenset[str], plus: Plus,
) -> tuple[Array | None, list[Array] | None, list[Array] | None]:  # fmt: skip
    weight, down, up = (k.stacked(what) for what in (weights, downs, ups))
    (n, out, width), rank = weight.shape, down.shape[1]
    x, rows = k.rows_first(input).reshape(-1, width), _side_by_side(k, g)
    if "input" in needs:
        flat = k.rows_first(rows).reshape(*input.shape[:-1], n * out)
        matrices = weight.reshape(-1, width), up.reshape(-1, rank), down.reshape(-1, width)
        dx, inner = k.low_rank(flat, *matrices, scale, splits=n, **_place(plus.get("input")))
    else:
        dx, inner = None, k.empty((len(x), n * rank), x.dtype)
        k.matmul(rows.transpose(1, 0, 2), up, out=inner.reshape(-1, n, rank).transpose(1, 0, 2), alpha=scale)
    wanted = {n[:-1]: plus.get(n) for n in ("downs", "ups") if n in needs}
    made = _factor_gradients(k, _Thin(x, rows, inner, low, rank), wanted)
    return dx, made.get("down"), made.get("up")


# ---- gradients of the factors ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Thin:
    """What the factors' gradients are products of, for n layers of one input: `inner`^T x and `rows`^T low.

    x (M, K), rows (M, n, N), inner and low (M, n rank).
    """

    x: Array
    rows: Array
    inner: Array
    low: Array
    rank: int

    def shape(self, name: str) -> tuple[int, int, int]:
        """The stacked gradients' shape."""
        n, out = self.rows.shape[1:]
        return (n, self.rank, self.x.shape[1]) if name == "down" else (n, out, self.rank)


Wanted = Mapping[str, Sequence[Held] | None]
"""The gradients wanted, "down" or "up", each with what they may be added to."""


def _listed(held: Held | None) -> list[Held] | None:
    return None if held is None else [held]


def _factor_gradients(k: Any, t: _Thin, wanted: Wanted) -> dict[str, list[Array]]:
    """The factors' gradients in full precision, a list by name; what is held is added to in place where it can be."""
    blocks = {n: _block(k, held) if held else None for n, held in wanted.items()}
    apart = [n for n, held in wanted.items() if held and getattr(blocks[n], "dtype", None) != float32]
    if len(wanted) == 2 and not apart and _at_once(k, t):
        final = all(held and all(h.final for h in held) for held in wanted.values())
        made = _both(k, t, blocks, final)
        return {n: [h.array for h in held] if held else made[n] for n, held in wanted.items()}
    n, rank = t.rows.shape[1], t.rank
    products = {
        "down": (t.inner.T, t.x),
        "up": (t.rows.transpose(1, 2, 0), t.low.reshape(-1, n, rank).transpose(1, 0, 2)),
    }
    return {name: _stacked_sums(k, held, *products[name], t.shape(name)) for name, held in wanted.items()}


_DEPTH, _THREADS = 32, 128  # as in lora.cu
_LEAST_ROWS = 512  # below, cuBLASLt's kernels do as well
_CUTS = ((128, 4, 4 / 3), (64, 4, 1), (64, 8, 0))
"""A tile's columns, the blocks that share it, and how many blocks a multiprocessor there must be."""


def _at_once(k: Any, t: _Thin) -> bool:
    """Whether lora.cu makes both products. They are launches more than work where the factors are thin."""
    m, (n, out) = len(t.x), t.rows.shape[1:]
    arrays = (t.x, t.rows, t.inner, t.low)
    return (
        k.compute_capability >= 90
        and not conditions.same(conditions.LOW, *arrays)
        and t.rank % 16 == 0
        and n * t.rank <= 64
        and m >= _LEAST_ROWS
        and not (t.x.shape[1] % 8 or out % 8)
        and all(a.strides[-1] == a.itemsize and a.data.ptr % 16 == 0 for a in arrays)
        and all(s % 16 == 0 for a in arrays for s in a.strides[:-1])
    )


def _tiles(t: _Thin, columns: int) -> int:
    (n, out), width = t.rows.shape[1:], t.x.shape[1]
    return n * t.rank // 16 * (-(-width // columns) - (-out // columns))


def _both(k: Any, t: _Thin, targets: Mapping[str, Any], final: bool) -> dict[str, list[Array]]:
    """Both gradients by lora.cu, added to the targets where there are some, beside other work if all are `final`."""
    made = {n: k.empty(t.shape(n), float32) if target is None else target for n, target in targets.items()}
    (n, out), (m, width), rank = t.rows.shape[1:], t.x.shape, t.rank
    x_row, row, item, inner_row, low_row = (
        a.strides[d] // a.itemsize for a, d in ((t.x, 0), (t.rows, 0), (t.rows, 1), (t.inner, 0), (t.low, 0))
    )
    steps = [np.int64(s) for s in (0, 0, 0, rank, item, out * rank)]
    sizes = [
        (inner_row, x_row, n * rank // 16, width, 1, targets["down"] is not None),
        (low_row, row, rank // 16, out, n, targets["up"] is not None),
    ]
    counts = [[np.int32(v) for v in side] for side in sizes]
    columns, share = next((c for c in _CUTS if _tiles(t, c[0]) * c[1] >= c[2] * k.multiprocessors), _CUTS[-1])[:2]
    span = -(-m // (share * _DEPTH)) * _DEPTH
    args = (
        t.inner, t.x, made["down"], *steps[:3], *counts[0], t.low, t.rows, made["up"], *steps[3:], *counts[1],
        np.int32(m), np.int32(span),
    )  # fmt: skip
    kernel, grid = f"lora_gradients_{columns}_{share}", (_tiles(t, columns), share)
    launch = partial(k.launch, "lora.cu", kernel, t.x.dtype, grid, _THREADS, args)
    if final:
        k.beside.put(launch, t.x, t.rows, t.inner, t.low, *made.values())
    else:
        launch()
    return {name: list(block) for name, block in made.items()}


def _block(k: Any, held: Sequence[Held]) -> Any:
    """What is held as one dense array that may be written over, if it lies so."""
    block = k.adjacent([h.array for h in held]) if all(h.owned for h in held) else None
    return block if block is not None and block.flags.c_contiguous else None


def _stacked_sums(
    k: Any, held: Sequence[Held] | None, a: Array, b: Array, shape: tuple[int, int, int]
) -> list[Array]:  # fmt: skip
    """a @ b as n gradients in full precision; what is held is added to in place where it lies as one block."""
    block = _block(k, held) if held else None
    if block is not None:
        target = block.reshape(*a.shape[:-1], b.shape[-1])
        k.matmul(a, b, out=target, plus=target)
        return [h.array for h in held or ()]
    made = k.matmul(a, b, out_dtype=compute_dtype(a.dtype)).reshape(shape)
    return [g + h.array for g, h in zip(made, held, strict=True)] if held else list(made)


@lora_linears.large_samples
def _() -> Iterator[Sample]:
    yield sample((2, 77, 320), [(640, 320)] * 3, [(16, 320)] * 3, [(640, 16)] * 3, 0.5)
    yield sample((100, 96), [(64, 96)] * 2, [(4, 96)] * 2, [(64, 4)] * 2, 1.0)
    yield sample((2, 300, 64), [(72, 64)] * 2, [(32, 64)] * 2, [(72, 32)] * 2, 1.0)


# ---- convolutions ------------------------------------------------------------------------------------------


@composite()
def lora_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float, stride: Pair = 1,
    padding: Pair = 0, layout: str = "NCHW",
) -> Tensor:  # fmt: skip
    """conv2d(input, weight, bias) + conv1x1(scale * conv2d(input, down), up): down keeps the kernel, up is 1x1"""
    low = conv2d(input, down, None, stride, padding, layout=layout) * scale
    update = conv2d(low, up, layout=layout)
    return conv2d(input, weight, bias, stride, padding, layout=layout) + update


@lora_conv2d.errors
def _() -> Iterator[ErrorSample]:
    bad = sample((1, 4, 4, 4), (5, 3, 1, 1), None, (2, 3, 1, 1), (5, 2, 1, 1), 1.5)
    yield ErrorSample(bad, ShapeError, "has 4 channels but weight .* takes 3")


@lora_conv2d.samples
def _() -> Iterator[Sample]:
    yield sample((1, 4, 3, 3), (5, 3, 3, 3), (5,), (2, 3, 3, 3), (5, 2, 1, 1), 0.5, 1, 1, "NHWC")
    yield sample((1, 3, 4, 4), (5, 3, 1, 1), None, (2, 3, 1, 1), (5, 2, 1, 1), 1.5)


@lora_linear.large_samples
def _() -> Iterator[Sample]:
    yield sample((2, 77, 320), (640, 320), (640,), (16, 320), (640, 16), 0.5)
    yield sample((100, 96), (64, 96), None, (4, 96), (64, 4), 1.0)
    yield sample((1, 521, 136), (72, 136), (72,), (16, 136), (72, 16), 0.5)
    yield sample((2, 1300, 64), (128, 64), None, (48, 64), (128, 48), 1.5)
    yield sample((2, 77, 320), (640, 320), (640,), (16, 320), (640, 16), 0.5, (2, 77, 640))
