"""Layers of one input, stored in 8 bits, each with a low-rank update that is not: see `fp8.py` and `lora.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array
from ...grad_target import GradTargets
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from .e4m3 import rounded
from .fp8 import broadcast_grad, check_layer, decode, encode, fp8_product_to, products, storage, stored, weight_of
from .lora import check_factors, lora_hidden_grad, stacked_gradients, stacked_products
from .lora_gradients import factor_gradients, listed, side_by_side
from .matmul import rows_product
from .skinny_gemm import SkinnyOperands


@primitive(aux=("low",), multiple=True)
def fp8_lora_linears(
    xp: Namespace,
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    scale: float,
    bias: Array | None = None,
    residual: Array | None = None,
    dynamic: bool = False,
) -> tuple[list[Array], Array]:
    """fp8_linear(input, codes[i], scales[i], bias, residual) + (scale * input @ downs[i]^T) @ ups[i]^T for each i

    bias and residual are for one layer alone. With `dynamic` the update still sees the input as it is.
    """
    _check(input, codes, scales, downs, ups, bias, residual)
    x = rounded(xp, input) if dynamic else input
    made, lows = [], []
    for c, s, down, up in zip(codes, scales, downs, ups, strict=True):
        y = rows_product(xp, x, weight_of(xp, c, s, input.dtype).T)
        for term in (bias, residual):
            y = y if term is None else y + term
        lows.append(rows_product(xp, input, down.T) * scale)
        made.append(y + rows_product(xp, lows[-1], up.T))
    return made, xp.concatenate(lows, axis=-1).reshape(-1, sum(len(d) for d in downs))


fp8_lora_linears.non_differentiable("codes", "scales")


def _check(
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    bias: Array | None,
    residual: Array | None,
) -> None:
    counts = [len(what) for what in (codes, scales, downs, ups)]
    if len(set(counts)) > 1 or not counts[0]:
        words = "{} codes, {} scales, {} downs and {} ups".format(*counts)
        raise ShapeError(f"fp8_lora_linears: {words} do not pair up")
    if counts[0] > 1 and not bias is residual is None:
        raise ShapeError(f"fp8_lora_linears: expected no bias and no residual for {counts[0]} layers")
    for c, s in zip(codes, scales, strict=True):
        check_layer(input, c, s, residual, "fp8_lora_linears")
    for c, down, up in zip(codes, downs, ups, strict=True):
        check_factors("fp8_lora_linears", c, down, up)


@fp8_lora_linears.vjp("input", "downs", "ups")
def _(
    xp: Namespace,
    g: Sequence[Array],
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    low: Array,
    scale: float,
    dynamic: bool,
    needs: frozenset[str],
) -> tuple[Array | None, list[Array] | None, list[Array] | None]:
    x = input.reshape(-1, input.shape[-1])
    rows = [part.reshape(-1, part.shape[-1]) for part in g]
    inner = [xp.matmul(r, up) * scale for r, up in zip(rows, ups, strict=True)]
    dx = None
    if "input" in needs:
        whole = xp.concatenate(rows, axis=-1), xp.concatenate(codes), xp.concatenate(scales)
        dx = broadcast_grad(xp, *whole, dynamic) + sum(xp.matmul(i, d) for i, d in zip(inner, downs, strict=True))
        dx = dx.reshape(input.shape)
    ends = np.cumsum([len(d) for d in downs])[:-1]
    d_downs = [xp.matmul(i.T, x) for i in inner] if "downs" in needs else None
    lows = xp.split(low, ends.tolist(), axis=-1)
    return dx, d_downs, [xp.matmul(r.T, t) for r, t in zip(rows, lows, strict=True)] if "ups" in needs else None


fp8_lora_linears.vjp("bias")(lambda xp, g: g[0])
fp8_lora_linears.vjp("residual")(lambda xp, g: g[0])


def _stored(n: int, *shape: int) -> tuple[list[Array], list[Array]]:
    made = [stored(*shape) for _ in range(n)]
    return [codes for codes, _ in made], [scales for _, scales in made]


fp8_lora_linears.samples(
    sample((2, 3, 8), *_stored(2, 6, 8), [(2, 8), (2, 8)], [(6, 2), (6, 2)], 0.5),
    sample((4, 8), *_stored(1, 6, 8), [(1, 8)], [(6, 1)], 2.0, (6,), (4, 6)),
    sample((2, 8), *_stored(1, 6, 8), [(2, 8)], [(6, 2)], 0.5),
)
fp8_lora_linears.perf_samples(
    sample((2, 77, 320), *_stored(3, 640, 320), [(16, 320)] * 3, [(640, 16)] * 3, 0.5),
    sample((1, 521, 144), *_stored(1, 80, 144), [(16, 144)], [(80, 16)], 0.5, (80,), (1, 521, 80)),
    sample((2, 77, 320), *_stored(3, 640, 320), [(16, 320)] * 3, [(640, 16)] * 3, 0.5, dynamic=True),
    sample((1, 521, 144), *_stored(1, 80, 144), [(16, 144)], [(80, 16)], 0.5, (80,), (1, 521, 80), dynamic=True),
)


def _fp8_lora_linears_errors() -> Iterator[ErrorSample]:
    one, two = _stored(1, 6, 8), _stored(2, 6, 8)
    yield ErrorSample(sample((2, 8), *two, [(2, 8)], [(6, 2)], 0.5), ShapeError, "2 codes, 2 scales, 1 downs and 1 ups")
    pair = [(2, 8)] * 2, [(6, 2)] * 2
    yield ErrorSample(sample((2, 8), *two, *pair, 0.5, (6,)), ShapeError, "no bias and no residual for 2 layers")
    yield ErrorSample(sample((2, 7), *one, [(2, 7)], [(6, 2)], 0.5), ShapeError, r"last dim 7 but weight is \(6, 8\)")


fp8_lora_linears.errors(*_fp8_lora_linears_errors())


# ---- kernels -----------------------------------------------------------------------------------------------


def _alike(
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    bias: Array | None,
    residual: Array | None,
) -> str:
    try:
        _check(input, codes, scales, downs, ups, bias, residual)
    except (ShapeError, TypeError):
        return "arguments that are refused"
    for what in (codes, downs, ups):
        if len({w.shape for w in what}) > 1:
            return "layers of several shapes"
    return conditions.same(conditions.AT_MOST_FP32, input, *downs, *ups, bias, residual)


def _storage(input: Array, codes: Sequence[Array], dynamic: bool) -> str:
    return storage(input, codes[0], dynamic)


def _products(input: Array, codes: Sequence[Array], dynamic: bool) -> str:
    return products(input, codes[0], dynamic)


def _decoded(k: Launcher, codes: Sequence[Array], scales: Sequence[Array], like: Array) -> Array:
    """The layers' decoded weights (n, out, in) in the dtype of `like`."""
    return decode(k, k.stacked(codes), k.stacked(scales), like.dtype)


@fp8_lora_linears.cuda("cublaslt", when=(_alike, _storage))
def _(
    k: Launcher,
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    scale: float,
    bias: Array | None,
    residual: Array | None,
) -> tuple[list[Array], Array]:
    weight = _decoded(k, codes, scales, input)
    return stacked_products(k, input, weight, downs, ups, scale, bias, residual)


@fp8_lora_linears.cuda_vjp("cublaslt", "input", "downs", "ups", when=(_alike, _storage))
def _(
    k: Launcher,
    g: Sequence[Array],
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    low: Array,
    scale: float,
    targets: GradTargets,
) -> tuple[Array | None, list[Array] | None, list[Array] | None]:
    weight = (
        _decoded(k, codes, scales, input) if "input" in targets else k.stacked(codes)
    )  # else only its shape is read
    return stacked_gradients(k, g, input, weight, downs, ups, low, scale, targets)


@fp8_lora_linears.cuda("fp8", when=(_alike, _products))
def _(
    k: Launcher,
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    scale: float,
    bias: Array | None,
    residual: Array | None,
) -> tuple[list[Array], Array]:
    stack, factors, down, up = (k.contiguous(k.stacked(what)) for what in (codes, scales, downs, ups))
    n, out, width = stack.shape
    x = k.contiguous(input).reshape(-1, width)
    low, y = k.matmul(x, down.reshape(-1, width).T, alpha=scale), k.empty((len(x), n * out), x.dtype)
    parts = (a.reshape(len(x), n, -1).transpose(1, 0, 2) for a in (low, y))
    added = None if residual is None else residual.reshape(1, -1, out)
    k.matmul(next(parts), up.transpose(0, 2, 1), out=next(parts), plus=added)
    weight = stack.reshape(-1, width), factors.reshape(-1)
    k.scaled_product(*encode(k, x), *weight, out=y, bias=bias, plus=y)
    shape = (*input.shape[:-1], out)
    return [y[:, i * out : (i + 1) * out].reshape(shape) for i in range(n)], low


@fp8_lora_linears.cuda_vjp("fp8", "input", "downs", "ups", when=(_alike, _products))
def _(
    k: Launcher,
    g: Sequence[Array],
    input: Array,
    codes: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    low: Array,
    scale: float,
    targets: GradTargets,
) -> tuple[Array | None, list[Array] | None, list[Array] | None]:
    stack, factors, down, up = (k.stacked(what) for what in (codes, scales, downs, ups))
    (n, out, width), rank = stack.shape, down.shape[1]
    x, rows = k.contiguous(input).reshape(-1, width), side_by_side(k, g)
    inner, dx = lora_hidden_grad(k, rows, up, scale), None
    if "input" in targets:
        flat = k.contiguous(rows).reshape(*input.shape[:-1], n * out)
        weight = stack.reshape(-1, width), factors.reshape(-1)
        dx = fp8_product_to(k, flat, *weight, targets["input"])
        k.matmul(inner, down.reshape(-1, width), out=dx.reshape(-1, width), plus=dx.reshape(-1, width))
    made = factor_gradients(k, SkinnyOperands(x, rows, inner, low, rank), listed(targets, n))
    return dx, made.get("down"), made.get("up")
