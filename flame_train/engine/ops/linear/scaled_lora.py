"""Layers of one input, stored in 8 bits, each with a low-rank update that is not: see `scaled.py` and `lora.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....errors import ShapeError
from ...arguments import Arguments
from ...autograd.grad_target import GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, int8, uint8
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from . import convrot
from .low_rank import (
    AppliedLowRanks,
    Gradients,
    LowRanks,
    check_factors,
    lora_hidden_grad,
    stacked_gradients,
    stacked_products,
)
from .matmul import rows_product
from .scaled import check_layer, input_grad, products, scaled_product_to, storage, stored_product
from .scaled_storage import decode, encode, stored
from .skinny_gemm import SkinnyOperands, factor_gradients, listed, side_by_side


@dataclass(frozen=True, slots=True)
class ScaledWeights(Arguments):
    """The weights of n layers, each as data (out, in), e4m3 in uint8 or int8, scales (out,), and rotated together."""

    data: Sequence[Array]
    scales: Sequence[Array]
    rotated: int

    def decoded(self, k: Launcher, dtype: DType) -> Array:
        """Returns the weights (n, out, in) in `dtype`."""
        return decode(k, k.stacked(self.data), k.stacked(self.scales), dtype, self.rotated)


@primitive(aux=("lora_hidden",), multiple=True)
def scaled_lora_linears(
    xp: Namespace,
    input: Array,
    data: Sequence[Array],
    scales: Sequence[Array],
    downs: Sequence[Array],
    ups: Sequence[Array],
    scale: float,
    bias: Array | None = None,
    residual: Array | None = None,
    dynamic: bool = False,
    rotated: int = 0,
) -> tuple[list[Array], Array]:
    """scaled_linear(input, data[i], scales[i], bias, residual) + (scale * input @ downs[i]^T) @ ups[i]^T for each i

    bias and residual are for one layer alone. With `dynamic` the update still sees the input as it is.

    Args:
        data: n of e4m3 in uint8, or of int8 (out, in).
        dynamic: whether the products with the stored weights are of 8 bits.
        rotated: data's columns that are rotated together, see `convrot.py`; 0: none.

    Returns:
        n outputs (..., out), and the low-rank activations (rows, n rank).
    """
    _check(input, ScaledWeights(data, scales, rotated), LowRanks(downs, ups, scale), bias, residual)
    made, hiddens = [], []
    for c, s, down, up in zip(data, scales, downs, ups, strict=True):
        y = stored_product(xp, input, c, s, dynamic, rotated)
        for term in (bias, residual):
            y = y if term is None else y + term
        hiddens.append(rows_product(xp, input, down.T) * scale)
        made.append(y + rows_product(xp, hiddens[-1], up.T))
    return made, xp.concatenate(hiddens, axis=-1).reshape(-1, sum(len(d) for d in downs))


scaled_lora_linears.non_differentiable("data", "scales")


def _check(input: Array, weights: ScaledWeights, lora: LowRanks, bias: Array | None, residual: Array | None) -> None:
    """Raises ShapeError or TypeError unless all these go together."""
    counts = [len(what) for what in (weights.data, weights.scales, lora.downs, lora.ups)]
    if len(set(counts)) > 1 or not counts[0]:
        words = "{} weights, {} scales, {} downs and {} ups".format(*counts)
        raise ShapeError(f"scaled_lora_linears: {words} do not pair up")
    if counts[0] > 1 and not bias is residual is None:
        raise ShapeError(f"scaled_lora_linears: expected no bias and no residual for {counts[0]} layers")
    if len({w.dtype for w in weights.data}) > 1:
        raise TypeError("scaled_lora_linears: expected data of one format, got uint8 and int8")
    for w, s, down, up in zip(weights.data, weights.scales, lora.downs, lora.ups, strict=True):
        check_layer(input, w, s, residual, "scaled_lora_linears", weights.rotated)
        check_factors("scaled_lora_linears", w, down, up)


@scaled_lora_linears.vjp("input", "downs", "ups")
def _(
    xp: Namespace,
    g: Sequence[Array],
    input: Array,
    weights: ScaledWeights,
    lora: AppliedLowRanks,
    dynamic: bool,
    needs: frozenset[str],
) -> Gradients:
    x = input.reshape(-1, input.shape[-1])
    rows = [part.reshape(-1, part.shape[-1]) for part in g]
    grad_hidden = [xp.matmul(r, up) * lora.scale for r, up in zip(rows, lora.ups, strict=True)]
    dx = None
    if "input" in needs:
        whole = xp.concatenate(rows, axis=-1), xp.concatenate(weights.data), xp.concatenate(weights.scales)
        updates = sum(xp.matmul(h, down) for h, down in zip(grad_hidden, lora.downs, strict=True))
        dx = (input_grad(xp, *whole, dynamic, weights.rotated) + updates).reshape(input.shape)
    d_downs = [xp.matmul(h.T, x) for h in grad_hidden] if "downs" in needs else None
    ends = np.cumsum([len(d) for d in lora.downs])[:-1]
    hiddens = xp.split(lora.lora_hidden, ends.tolist(), axis=-1)
    return dx, d_downs, [xp.matmul(r.T, h) for r, h in zip(rows, hiddens, strict=True)] if "ups" in needs else None


scaled_lora_linears.vjp("bias")(lambda xp, g: g[0])
scaled_lora_linears.vjp("residual")(lambda xp, g: g[0])


def _stored(n: int, *shape: int, dtype: DType = uint8) -> tuple[list[Array], list[Array]]:
    made = [stored(*shape, dtype=dtype) for _ in range(n)]
    return [data for data, _ in made], [scales for _, scales in made]


scaled_lora_linears.samples(
    lambda: (
        sample((2, 3, 8), *_stored(2, 6, 8), [(2, 8), (2, 8)], [(6, 2), (6, 2)], 0.5),
        sample((4, 8), *_stored(1, 6, 8), [(1, 8)], [(6, 1)], 2.0, (6,), (4, 6)),
        sample((2, 8), *_stored(1, 6, 8), [(2, 8)], [(6, 2)], 0.5),
        sample((2, 3, 8), *_stored(2, 6, 8, dtype=int8), [(2, 8), (2, 8)], [(6, 2), (6, 2)], 0.5),
        sample((2, 16), *_stored(2, 6, 16, dtype=int8), [(2, 16), (2, 16)], [(6, 2), (6, 2)], 0.5, rotated=16),
    )
)
scaled_lora_linears.perf_samples(
    lambda: (
        sample((2, 77, 320), *_stored(3, 640, 320), [(16, 320)] * 3, [(640, 16)] * 3, 0.5),
        sample((1, 521, 144), *_stored(1, 80, 144), [(16, 144)], [(80, 16)], 0.5, (80,), (1, 521, 80)),
        sample((2, 77, 320), *_stored(3, 640, 320), [(16, 320)] * 3, [(640, 16)] * 3, 0.5, dynamic=True),
        sample((1, 521, 144), *_stored(1, 80, 144), [(16, 144)], [(80, 16)], 0.5, (80,), (1, 521, 80), dynamic=True),
        sample((1, 521, 144), *_stored(1, 80, 144, dtype=int8), [(16, 144)], [(80, 16)], 0.5, (80,), dynamic=True),
        *(
            sample((2, 77, 320), *of_three, [(16, 320)] * 3, [(640, 16)] * 3, 0.5, dynamic=True, rotated=group)
            for of_three in (_stored(3, 640, 320, dtype=int8),)
            for group in (0, 64)
        ),
    )
)


def _scaled_lora_linears_errors() -> Iterator[ErrorSample]:
    one, two = _stored(1, 6, 8), _stored(2, 6, 8)
    yield ErrorSample(
        sample((2, 8), *two, [(2, 8)], [(6, 2)], 0.5), ShapeError, "2 weights, 2 scales, 1 downs and 1 ups"
    )
    pair = [(2, 8)] * 2, [(6, 2)] * 2
    yield ErrorSample(sample((2, 8), *two, *pair, 0.5, (6,)), ShapeError, "no bias and no residual for 2 layers")
    yield ErrorSample(sample((2, 7), *one, [(2, 7)], [(6, 2)], 0.5), ShapeError, r"last dim 7 but weight is \(6, 8\)")


scaled_lora_linears.errors(_scaled_lora_linears_errors)


# ---- kernels -----------------------------------------------------------------------------------------------


def _alike(input: Array, weights: ScaledWeights, lora: LowRanks, bias: Array | None, residual: Array | None) -> str:
    try:
        _check(input, weights, lora, bias, residual)
    except (ShapeError, TypeError):
        return "arguments that are refused"
    if problem := convrot.unfit(weights.rotated):
        return problem
    for what in (weights.data, lora.downs, lora.ups):
        if len({(w.shape, w.dtype) for w in what}) > 1:
            return "layers of several shapes or formats"
    return conditions.same(conditions.AT_MOST_FP32, input, *lora.downs, *lora.ups, bias, residual)


def _storage(input: Array, data: Sequence[Array], dynamic: bool) -> str:
    return storage(input, data[0], dynamic)


def _products(input: Array, data: Sequence[Array], dynamic: bool) -> str:
    return products(input, data[0], dynamic)


@scaled_lora_linears.cuda("cublaslt", when=(_alike, _storage))
def _(
    k: Launcher, input: Array, weights: ScaledWeights, lora: LowRanks, bias: Array | None, residual: Array | None
) -> tuple[list[Array], Array]:
    return stacked_products(k, input, weights.decoded(k, input.dtype), lora, bias, residual)


@scaled_lora_linears.cuda_vjp("cublaslt", "input", "downs", "ups", when=(_alike, _storage))
def _(
    k: Launcher, g: Sequence[Array], input: Array, weights: ScaledWeights, lora: AppliedLowRanks, targets: GradTargets
) -> Gradients:
    weight = weights.decoded(k, input.dtype) if "input" in targets else k.stacked(weights.data)
    return stacked_gradients(k, g, input, weight, lora, targets)


@scaled_lora_linears.cuda("scaled", when=(_alike, _products))
def _(
    k: Launcher, input: Array, weights: ScaledWeights, lora: LowRanks, bias: Array | None, residual: Array | None
) -> tuple[list[Array], Array]:
    stack, factors = k.contiguous(k.stacked(weights.data)), k.contiguous(k.stacked(weights.scales))
    down, up = k.contiguous(k.stacked(lora.downs)), k.contiguous(k.stacked(lora.ups))
    n, out, width = stack.shape
    x = k.contiguous(input).reshape(-1, width)
    lora_hidden = k.matmul(x, down.reshape(-1, width).T, alpha=lora.scale)
    y = k.empty((len(x), n * out), x.dtype)
    weight, low = (stack.reshape(-1, width), factors.reshape(-1)), (lora_hidden, up.reshape(n * out, -1).T, n)
    rounded = encode(k, x, stack.dtype, rotated=weights.rotated)
    k.scaled_product(rounded, weight, out=y, bias=bias, plus=residual, low=low)
    shape = (*input.shape[:-1], out)
    return [y[:, i * out : (i + 1) * out].reshape(shape) for i in range(n)], lora_hidden


@scaled_lora_linears.cuda_vjp("scaled", "input", "downs", "ups", when=(_alike, _products))
def _(
    k: Launcher, g: Sequence[Array], input: Array, weights: ScaledWeights, lora: AppliedLowRanks, targets: GradTargets
) -> Gradients:
    stack, factors, down, up = (k.stacked(what) for what in (weights.data, weights.scales, lora.downs, lora.ups))
    (n, out, width), rank = stack.shape, down.shape[1]
    x, rows = k.contiguous(input).reshape(-1, width), side_by_side(k, g)
    grad_hidden, dx = lora_hidden_grad(k, rows, up, lora.scale), None
    if "input" in targets:
        flat = k.contiguous(rows).reshape(*input.shape[:-1], n * out)
        weight = stack.reshape(-1, width), factors.reshape(-1)
        low = grad_hidden, down.reshape(-1, width), 1
        dx = scaled_product_to(k, flat, *weight, targets["input"], rotated=weights.rotated, low=low)
    made = factor_gradients(k, SkinnyOperands(x, rows, grad_hidden, lora.lora_hidden, rank), listed(targets, n))
    return dx, made.get("down"), made.get("up")
