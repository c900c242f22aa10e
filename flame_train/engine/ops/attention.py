"""Scaled dot-product attention, block by block: the L x L matrix is never whole in memory.

The forward pass keeps each row's log-sum-exp, from which the backward pass rebuilds any block of the
probabilities (FlashAttention, arXiv 2205.14135). On CUDA in bf16 and fp16 cuDNN does both, else cuBLASLt's products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, primitive, sample
from . import conditions

_BLOCK_BYTES = 1 << 26  # one block of scores, over all batches and heads, stays below this


def _blocks(query: Array, key: Array) -> Iterator[slice]:
    """Ranges of query rows whose scores fit the block size."""
    row = max(1, math.prod(query.shape[:-2]) * key.shape[-2] * query.itemsize)
    step = max(1, _BLOCK_BYTES // row)
    n = query.shape[-2]
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def _scores(xp: Any, query: Array, key: Array, mask: Array | None, causal: bool, scale: float, rows: slice) -> Array:
    """The scaled, masked scores of some query rows, (..., rows, keys)."""
    s = xp.matmul(query[..., rows, :], key.swapaxes(-1, -2)) * scale
    if causal:
        below = xp.arange(rows.start, rows.stop)[:, None] >= xp.arange(key.shape[-2])[None, :]
        s = xp.where(below, s, -math.inf)
    if mask is not None:
        part = mask[..., rows, :] if mask.shape[-2] != 1 else mask
        s = xp.where(part, s, -math.inf) if mask.dtype == bool else s + part
    return s


@primitive(torch="nn.functional.scaled_dot_product_attention", aux=("lse",))
def scaled_dot_product_attention(
    xp: Any, query: Array, key: Array, value: Array, attn_mask: Array | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """softmax(query @ key^T * scale + mask) @ value, per head; scale is 1 / sqrt(head dim) unless given

    A boolean mask says where to look, any other is added to the scores; a query that may look nowhere gets zeros.
    With enable_gqa, key and value have fewer heads (dim -3), each for as many queries' heads in a row
    (arXiv 2305.13245).
    """
    check_attention(query, key, value, dropout_p, enable_gqa)
    shape = (*query.shape[:-1], value.shape[-1])
    factor = scale if scale is not None else query.shape[-1] ** -0.5
    query, key, value, attn_mask = _by_group(query, key, value, attn_mask, enable_gqa)
    out = xp.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
    lse = xp.empty((*query.shape[:-1], 1), query.dtype)
    for rows in _blocks(query, key):
        s = _scores(xp, query, key, attn_mask, is_causal, factor, rows)
        top = xp.max(s, axis=-1, keepdims=True)
        top = xp.where(top == -math.inf, 0.0, top)
        e = xp.exp(s - top)
        total = xp.sum(e, axis=-1, keepdims=True)
        blind = total == 0.0
        total = xp.where(blind, 1.0, total)
        out[..., rows, :] = xp.matmul(e, value) / total
        lse[..., rows, :] = xp.where(blind, math.inf, top + xp.log(total))
    return out.reshape(shape), lse.reshape(*shape[:-1], 1)


def _by_group(
    query: Array, key: Array, value: Array, mask: Array | None, grouped: bool
) -> tuple[Array, Array, Array, Array | None]:
    """All with the heads as (key heads, queries' heads for each), so that they broadcast; unchanged if not grouped."""
    if not grouped:
        return query, key, value, mask
    heads = key.shape[-3]
    query = query.reshape(*query.shape[:-3], heads, query.shape[-3] // heads, *query.shape[-2:])
    if mask is not None and mask.ndim > 2:
        each = (heads, query.shape[-3]) if mask.shape[-3] != 1 else (1, 1)
        mask = mask.reshape(*mask.shape[:-3], *each, *mask.shape[-2:])
    return query, key[..., None, :, :], value[..., None, :, :], mask


def check_attention(query: Array, key: Array, value: Array, dropout_p: float, grouped: bool) -> None:
    """Raises ShapeError when the three do not fit each other."""
    fit = query.shape[-1] == key.shape[-1] and key.shape[-2] == value.shape[-2] and key.shape[:-2] == value.shape[:-2]
    if grouped:
        fit = fit and query.ndim > 2 and query.shape[:-3] == key.shape[:-3] and query.shape[-3] % key.shape[-3] == 0
    if not fit or (not grouped and query.shape[:-2] != key.shape[:-2]):
        raise ShapeError(
            "scaled_dot_product_attention: expected query (..., L, E), key (..., S, E), value (..., S, V), "
            f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if dropout_p:
        raise ShapeError(f"scaled_dot_product_attention: only dropout_p=0 is built, got {dropout_p}")


def _gradient(
    xp: Any, g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, attn_mask: Array | None,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    shapes, factor = (query.shape, key.shape, value.shape), scale if scale is not None else query.shape[-1] ** -0.5
    query, key, value, attn_mask = _by_group(query, key, value, attn_mask, enable_gqa)
    g, out, lse = (a.reshape(*query.shape[:-1], a.shape[-1]) for a in (g, out, lse))
    dq, dk, dv = xp.empty(query.shape, g.dtype), xp.zeros(key.shape, g.dtype), xp.zeros(value.shape, g.dtype)
    drop = xp.sum(g * out, axis=-1, keepdims=True)
    for rows in _blocks(query, key):
        p = xp.exp(_scores(xp, query, key, attn_mask, is_causal, factor, rows) - lse[..., rows, :])
        gr = g[..., rows, :]
        ds = p * (xp.matmul(gr, value.swapaxes(-1, -2)) - drop[..., rows, :]) * factor
        dv += _over_group(xp, xp.matmul(p.swapaxes(-1, -2), gr), enable_gqa)
        dq[..., rows, :] = xp.matmul(ds, key)
        dk += _over_group(xp, xp.matmul(ds.swapaxes(-1, -2), query[..., rows, :]), enable_gqa)
    return dq.reshape(shapes[0]), dk.reshape(shapes[1]), dv.reshape(shapes[2])


scaled_dot_product_attention.vjp("query", "key", "value")(_gradient)


@scaled_dot_product_attention.vjp("attn_mask")
def _(
    xp: Any, g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, attn_mask: Array,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Array:  # fmt: skip
    """Of the size of all scores, unlike the others: for learnt biases of short sequences."""
    shape, factor = (*query.shape[:-1], key.shape[-2]), scale if scale is not None else query.shape[-1] ** -0.5
    query, key, value, attn_mask = _by_group(query, key, value, attn_mask, enable_gqa)
    g, out, lse = (a.reshape(*query.shape[:-1], a.shape[-1]) for a in (g, out, lse))
    every = slice(0, query.shape[-2])
    p = xp.exp(_scores(xp, query, key, attn_mask, is_causal, factor, every) - lse)
    return (p * (xp.matmul(g, value.swapaxes(-1, -2)) - xp.sum(g * out, axis=-1, keepdims=True))).reshape(shape)


def _over_group(xp: Any, g: Array, grouped: bool) -> Array:
    """The gradient of a key's head, summed over the queries' heads that share it."""
    return xp.sum(g, axis=-3, keepdims=True) if grouped else g


@scaled_dot_product_attention.samples
def _() -> Iterator[Sample]:
    yield sample((2, 2, 5, 4), (2, 2, 3, 4), (2, 2, 3, 4))
    yield sample((1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 2), is_causal=True)
    yield sample((3, 4), (5, 4), (5, 4), scale=0.3)
    yield sample((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), (2, 1, 1, 5))
    yield sample((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4), np.array([[True, False, True], [True, True, False]]))
    yield sample((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), enable_gqa=True)
    yield sample((1, 4, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (1, 4, 3, 3), enable_gqa=True)
    yield sample((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2), is_causal=True, enable_gqa=True)
    yield sample((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4), np.array([[True, False], [False, False]]))


@scaled_dot_product_attention.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 4), (3, 5), (3, 5)), ShapeError, r"got \(2, 4\), \(3, 5\), \(3, 5\)")
    yield ErrorSample(sample((3, 2, 4), (2, 2, 4), (2, 2, 4), enable_gqa=True), ShapeError, r"got \(3, 2, 4\)")
    yield ErrorSample(sample((2, 4), (2, 4), (2, 4), dropout_p=0.1), ShapeError, "only dropout_p=0 is built")


# ---- cuDNN ---------------------------------------------------------------------------------------------


def _flash(query: Array, key: Array, value: Array, attn_mask: Array | None, enable_gqa: bool) -> str:
    """Why cuDNN's flash attention is not asked; empty when it is."""
    if enable_gqa:
        return "grouped heads take the reference"
    if attn_mask is not None or query.ndim != 4 or 0 in (*query.shape, *key.shape):
        return "only (B, H, L, E) without a mask"
    if query.shape[-1] % 8 or query.shape[-1] > 128 or value.shape[-1] != query.shape[-1]:
        return f"head sizes {query.shape[-1]} and {value.shape[-1]}: expected equal, a multiple of 8, at most 128"
    return conditions.same(conditions.LOW, query, key, value)


def _unit(k: Any, x: Array) -> Array:
    return x if x.strides[-1] == x.itemsize else k.rows_first(x)


def _like_rows(k: Any, x: Array) -> Array:
    """Memory for (B, H, L, E) laid out as (B, L, H, E), so that merging the heads copies nothing."""
    b, h, length, e = x.shape
    return k.empty((b, length, h, e), x.dtype).transpose(0, 2, 1, 3)


@scaled_dot_product_attention.cuda("cudnn", when=_flash)
def _(
    k: Any, query: Array, key: Array, value: Array, attn_mask: None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> tuple[Array, Array]:  # fmt: skip
    check_attention(query, key, value, dropout_p, enable_gqa)
    q, key, value = (_unit(k, x) for x in (query, key, value))
    out, lse = _like_rows(k, q), k.empty((*q.shape[:-1], 1), np.dtype(np.float32))
    k.cudnn.attention_forward(q, key, value, out, lse, scale or q.shape[-1] ** -0.5, is_causal)
    return out, lse


@scaled_dot_product_attention.cuda_vjp("cudnn", "query", "key", "value", when=_flash)
def _(
    k: Any, g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, is_causal: bool,
    scale: float | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    q, key, value, g = (_unit(k, x) for x in (query, key, value, g))
    dq, dk, dv = (_like_rows(k, x) for x in (q, key, value))
    k.cudnn.attention_backward(q, key, value, out, lse, g, dq, dk, dv, scale or q.shape[-1] ** -0.5, is_causal)
    return dq, dk, dv


@scaled_dot_product_attention.large_samples
def _() -> Iterator[Sample]:
    yield sample((2, 4, 256, 64), (2, 4, 256, 64), (2, 4, 256, 64))
    yield sample((2, 4, 200, 64), (2, 4, 77, 64), (2, 4, 77, 64))
    yield sample((1, 2, 77, 64), (1, 2, 77, 64), (1, 2, 77, 64), is_causal=True)
    yield sample((1, 1, 300, 512), (1, 1, 300, 512), (1, 1, 300, 512))
    yield sample((2, 2, 64, 12), (2, 2, 77, 12), (2, 2, 77, 12))
