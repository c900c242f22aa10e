"""Scaled dot-product attention, block by block: the L x L matrix is never whole in memory.

The forward pass keeps each row's log-sum-exp, from which the backward pass rebuilds any block of the
probabilities (FlashAttention, arXiv 2205.14135). kernels.py says what runs on CUDA instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ....errors import ShapeError
from ...dtype import Array
from ...namespace import NUMPY, Namespace
from ...op import ErrorSample, primitive, sample
from ...op_samples import booleans, integers
from ...random import DROPOUT, Rng, blocks_of_bits, check_rng, uniform_of

_BLOCK_BYTES = 1 << 26  # one block of scores, over all batches and heads, stays below this


def _blocks(query: Array, key: Array, dropped: bool) -> Iterator[slice]:
    """Ranges of query rows whose scores, and random numbers for dropout if any, fit the block size."""
    row = max(1, math.prod(query.shape[:-2]) * key.shape[-2] * (64 if dropped else query.itemsize))
    step = max(1, _BLOCK_BYTES // row)
    n = query.shape[-2]
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def _scores(
    xp: Namespace, query: Array, key: Array, mask: Array | None, causal: bool, scale: float, rows: slice
) -> Array:
    """The scaled, masked scores of some query rows, (..., rows, keys)."""
    s = xp.matmul(query[..., rows, :], key.swapaxes(-1, -2)) * scale
    if causal:
        below = xp.arange(rows.start, rows.stop)[:, None] >= xp.arange(key.shape[-2])[None, :]
        s = xp.where(below, s, -math.inf)
    if mask is not None:
        part = mask[..., rows, :] if mask.shape[-2] != 1 else mask
        s = xp.where(part, s, -math.inf) if mask.dtype == bool else s + part
    return s


def _kept(xp: Namespace, scores: Array, heads: int, length: int, rows: slice, p: float, rng: Rng, stream: int) -> Array:
    """What dropout multiplies these scores' probabilities by: 0 or 1 / (1 - p).

    A sample's numbers lie as (heads, L, S rounded up to blocks of four), so that any rows can be drawn alone.
    """
    count = scores.shape[-1]
    per_row = -(-count // 4)
    here, head = xp.arange(rows.start, rows.stop, dtype=np.uint64), xp.arange(heads, dtype=np.uint64)
    row = (head[:, None] * length + here) * per_row
    block = (row[..., None] + xp.arange(per_row, dtype=np.uint64)).reshape(-1)
    words = blocks_of_bits(xp, rng.seed, stream, rng.step, xp.asarray(rng.samples), block)
    kept = uniform_of(words.reshape(-1, 4 * per_row)[:, :count]) >= np.float32(p)
    return (kept * scores.dtype.type(0.0 if p == 1.0 else 1.0 / (1.0 - p))).reshape(scores.shape)


@primitive(torch="nn.functional.scaled_dot_product_attention", aux=("lse",), accepts_integers=("attn_mask",))
def scaled_dot_product_attention(
    xp: Namespace,
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    rng: Rng | None = None,
    stream: int = DROPOUT,
) -> tuple[Array, Array]:
    """softmax(query @ key^T * scale + mask) @ value, per head; scale is 1 / sqrt(head dim) unless given

    A boolean mask says where to look, any other is added to the scores; a query that may look nowhere gets zeros.
    With enable_gqa, key and value have fewer heads (dim -3), each for as many queries' heads in a row
    (arXiv 2305.13245). With dropout_p, each probability is zeroed with it and the others divided by 1 - dropout_p;
    which ones is said by `rng`, whose samples are query's first dim, and `stream`, as in `dropout`.
    """
    check_attention(query, key, value, enable_gqa)
    if attn_mask is not None and attn_mask.dtype.kind in "iu":
        raise ShapeError(
            "scaled_dot_product_attention: expected a mask of truth values or of numbers to add to the scores, "
            f"got {attn_mask.dtype.name}; mask != 0 makes truth values of it"
        )
    _check_dropout(query, dropout_p, rng)
    shape = (*query.shape[:-1], value.shape[-1])
    factor, heads = factor_of(scale, query), math.prod(query.shape[1:-2])
    query, key, value, attn_mask = _by_group(query, key, value, attn_mask, enable_gqa)
    out = xp.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
    lse = xp.empty((*query.shape[:-1], 1), query.dtype)
    for rows in _blocks(query, key, dropout_p > 0.0):
        s = _scores(xp, query, key, attn_mask, is_causal, factor, rows)
        top = xp.max(s, axis=-1, keepdims=True)
        top = xp.where(top == -math.inf, 0.0, top)
        e = xp.exp(s - top)
        total = xp.sum(e, axis=-1, keepdims=True)
        blind = total == 0.0
        total = xp.where(blind, 1.0, total)
        if rng is not None and dropout_p:
            e *= _kept(xp, e, heads, query.shape[-2], rows, dropout_p, rng, stream)
        out[..., rows, :] = xp.matmul(e, value) / total
        lse[..., rows, :] = xp.where(blind, math.inf, top + xp.log(total))
    return out.reshape(shape), lse.reshape(*shape[:-1], 1)


def _by_group(
    query: Array, key: Array, value: Array, mask: Array | None, grouped: bool
) -> tuple[Array, Array, Array, Array | None]:
    """All four with dim -3 split so that they broadcast, for H heads of keys, each shared by G heads of queries.

    query becomes (..., H, G, L, E), key and value (..., H, 1, S, E), unless not `grouped`; a mask gets 2 dims at least.
    """
    if mask is not None and mask.ndim < 2:
        mask = mask.reshape(*(1,) * (2 - mask.ndim), *mask.shape)
    if not grouped:
        return query, key, value, mask
    heads = key.shape[-3]
    query = query.reshape(*query.shape[:-3], heads, query.shape[-3] // heads, *query.shape[-2:])
    if mask is not None and mask.ndim > 2:
        each = (heads, query.shape[-3]) if mask.shape[-3] != 1 else (1, 1)
        mask = mask.reshape(*mask.shape[:-3], *each, *mask.shape[-2:])
    return query, key[..., None, :, :], value[..., None, :, :], mask


def check_attention(query: Array, key: Array, value: Array, grouped: bool) -> None:
    """Raises ShapeError unless query (..., L, E), key (..., S, E) and value (..., S, V) fit each other."""
    fit = min(query.ndim, key.ndim, value.ndim) > 1
    fit = fit and query.shape[-1] == key.shape[-1] and key.shape[:-1] == value.shape[:-1]
    if grouped:
        fit = fit and query.ndim > 2 and query.shape[:-3] == key.shape[:-3] and query.shape[-3] % key.shape[-3] == 0
    if not fit or (not grouped and query.shape[:-2] != key.shape[:-2]):
        raise ShapeError(
            "scaled_dot_product_attention: expected query (..., L, E), key (..., S, E), value (..., S, V), "
            f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )


def factor_of(scale: float | None, query: Array) -> float:
    return scale if scale is not None else query.shape[-1] ** -0.5


def _check_dropout(query: Array, p: float, rng: Rng | None) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"scaled_dot_product_attention: expected a probability dropout_p in [0, 1], got {p}")
    if not p:
        return
    rng = check_rng(rng, "scaled_dot_product_attention: dropout_p")
    samples = query.shape[0] if query.ndim > 2 else 1
    if rng.samples.shape != (samples,):
        raise ShapeError(
            f"scaled_dot_product_attention: rng has {rng.samples.size} samples, query {tuple(query.shape)} {samples}"
        )


def _gradient(
    xp: Namespace,
    g: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    attn_mask: Array | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    rng: Rng | None,
    stream: int,
) -> tuple[Array, Array, Array]:
    shapes, factor = (query.shape, key.shape, value.shape), factor_of(scale, query)
    heads = math.prod(query.shape[1:-2])
    query, key, value, attn_mask = _by_group(query, key, value, attn_mask, enable_gqa)
    g, out, lse = (a.reshape(*query.shape[:-1], a.shape[-1]) for a in (g, out, lse))
    dq, dk, dv = xp.empty(query.shape, g.dtype), xp.zeros(key.shape, g.dtype), xp.zeros(value.shape, g.dtype)
    delta = xp.sum(g * out, axis=-1, keepdims=True)
    for rows in _blocks(query, key, dropout_p > 0.0):
        p = xp.exp(_scores(xp, query, key, attn_mask, is_causal, factor, rows) - lse[..., rows, :])
        gr = g[..., rows, :]
        dp, used = xp.matmul(gr, value.swapaxes(-1, -2)), p
        if rng is not None and dropout_p:
            kept = _kept(xp, p, heads, query.shape[-2], rows, dropout_p, rng, stream)
            dp, used = dp * kept, p * kept
        ds = p * (dp - delta[..., rows, :]) * factor
        dv += _over_group(xp, xp.matmul(used.swapaxes(-1, -2), gr), enable_gqa)
        dq[..., rows, :] = xp.matmul(ds, key)
        dk += _over_group(xp, xp.matmul(ds.swapaxes(-1, -2), query[..., rows, :]), enable_gqa)
    return dq.reshape(shapes[0]), dk.reshape(shapes[1]), dv.reshape(shapes[2])


scaled_dot_product_attention.vjp("query", "key", "value")(_gradient)


@scaled_dot_product_attention.vjp("attn_mask")
def _(
    xp: Namespace,
    g: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    attn_mask: Array,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    rng: Rng | None,
    stream: int,
) -> Array:
    """Takes memory for all scores at once, unlike the other gradients: for learnt biases of short sequences."""
    shape, factor = (*query.shape[:-1], key.shape[-2]), factor_of(scale, query)
    heads = math.prod(query.shape[1:-2])
    query, key, value, attn_mask = _by_group(query, key, value, attn_mask, enable_gqa)
    g, out, lse = (a.reshape(*query.shape[:-1], a.shape[-1]) for a in (g, out, lse))
    every = slice(0, query.shape[-2])
    p = xp.exp(_scores(xp, query, key, attn_mask, is_causal, factor, every) - lse)
    dp = xp.matmul(g, value.swapaxes(-1, -2))
    if rng is not None and dropout_p:
        dp = dp * _kept(xp, p, heads, query.shape[-2], every, dropout_p, rng, stream)
    return (p * (dp - xp.sum(g * out, axis=-1, keepdims=True))).reshape(shape)


def _over_group(xp: Namespace, g: Array, grouped: bool) -> Array:
    """The gradient of a key's head, summed over the queries' heads that share it."""
    return xp.sum(g, axis=-3, keepdims=True) if grouped else g


def _rng(samples: int) -> Rng:
    return Rng(NUMPY, 7, 3, np.arange(samples))


scaled_dot_product_attention.samples(
    sample((2, 2, 5, 4), (2, 2, 3, 4), (2, 2, 3, 4)),
    sample((1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 2), is_causal=True),
    sample((3, 4), (5, 4), (5, 4), scale=0.3),
    sample((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), (2, 1, 1, 5)),
    sample((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4), np.array([[True, False, True], [True, True, False]])),
    sample((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), enable_gqa=True),
    sample((1, 4, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2), (1, 4, 3, 3), enable_gqa=True),
    sample((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2), is_causal=True, enable_gqa=True),
    sample((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4), np.array([[True, False], [False, False]])),
    sample((2, 2, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4), (5,), enable_gqa=True),
    sample((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3), None, 0.4, rng=_rng(2)),
    sample((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2), (3, 3), 0.3, True, enable_gqa=True, rng=_rng(1), stream=20),
    sample((3, 4), (5, 4), (5, 4), None, 1.0, rng=_rng(1)),
)
scaled_dot_product_attention.errors(
    ErrorSample(sample((2, 4), (3, 5), (3, 5)), ShapeError, r"got \(2, 4\), \(3, 5\), \(3, 5\)"),
    ErrorSample(sample((4,), (3, 4), (3, 4)), ShapeError, r"got \(4,\), \(3, 4\)"),
    ErrorSample(sample((3, 2, 4), (2, 2, 4), (2, 2, 4), enable_gqa=True), ShapeError, r"got \(3, 2, 4\)"),
    ErrorSample(sample((2, 4), (2, 4), (2, 4), dropout_p=0.1), ValueError, "dropout_p needs rng"),
    ErrorSample(sample((2, 4), (2, 4), (2, 4), dropout_p=1.5), ValueError, r"in \[0, 1\], got 1.5"),
    ErrorSample(sample((2, 4), (2, 4), (2, 4), integers(2, 2, 2)), ShapeError, "a mask of truth .*, got int64"),
    ErrorSample(
        sample((3, 1, 2, 4), (3, 1, 2, 4), (3, 1, 2, 4), dropout_p=0.1, rng=_rng(2)), ShapeError, "rng has 2 samples"
    ),
)


scaled_dot_product_attention.perf_samples(
    sample((2, 4, 256, 64), (2, 4, 256, 64), (2, 4, 256, 64)),
    sample((1, 2, 300, 64), (1, 2, 2125, 64), (1, 2, 2125, 64)),
    sample((1, 1, 64, 64), (1, 1, 2049, 64), (1, 1, 2049, 64), scale=0.3),
    sample((1, 22, 1024, 64), (1, 22, 130, 64), (1, 22, 130, 64)),
    sample((2, 4, 200, 64), (2, 4, 77, 64), (2, 4, 77, 64)),
    sample((1, 2, 333, 64), (1, 2, 80, 64), (1, 2, 80, 64), scale=0.2),
    sample((2, 70, 9, 64), (2, 70, 3, 64), (2, 70, 3, 64)),
    sample((1, 80, 130, 64), (1, 80, 77, 64), (1, 80, 77, 64)),
    sample((1, 2, 77, 64), (1, 2, 77, 64), (1, 2, 77, 64), is_causal=True),
    sample((1, 1, 300, 512), (1, 1, 300, 512), (1, 1, 300, 512)),
    sample((2, 2, 64, 12), (2, 2, 77, 12), (2, 2, 77, 12)),
    sample((1, 2, 100, 64), (1, 2, 77, 64), (1, 2, 77, 64), (1, 1, 1, 77)),
    sample((2, 2, 65, 40), (2, 2, 130, 40), (2, 2, 130, 40), booleans(2, 1, 65, 130)),
    sample((2, 6, 70, 80), (2, 2, 90, 80), (2, 2, 90, 80), is_causal=True, enable_gqa=True),
    sample((1, 4, 66, 33), (1, 2, 129, 33), (1, 2, 129, 17), booleans(66, 129), enable_gqa=True),
    sample((2, 70, 160), (2, 80, 160), (2, 80, 160), is_causal=True),
    sample((1, 2, 70, 200), (1, 2, 130, 200), (1, 2, 130, 100), booleans(1, 2, 70, 130)),
    sample((1, 1, 67, 512), (1, 1, 60, 512), (1, 1, 60, 300), (67, 60), is_causal=True),
    sample((64, 1, 70, 260), (64, 1, 130, 260), (64, 1, 130, 260), is_causal=True),
    sample((2, 4, 100, 64), (2, 4, 77, 64), (2, 4, 77, 64), booleans(2, 1, 1, 77)),
    sample((1, 8, 130, 128), (1, 2, 130, 128), (1, 2, 130, 128), enable_gqa=True),
    sample((2, 6, 129, 128), (2, 2, 129, 128), (2, 2, 129, 128), booleans(2, 1, 1, 129), 0.0, True, enable_gqa=True),
    sample((1, 4, 65, 128), (1, 4, 131, 128), (1, 4, 131, 128), (65, 131)),
    sample((2, 4, 70, 96), (2, 2, 131, 96), (2, 2, 131, 96), (1, 4, 70, 131), 0.0, True, enable_gqa=True),
    sample((2, 2, 64, 256), (2, 2, 72, 256), (2, 2, 72, 256), (72,)),
    sample((2, 2, 50, 160), (2, 2, 60, 160), (2, 2, 60, 160), booleans(2, 2, 50, 1)),
    sample((1, 2, 90, 128), (1, 2, 77, 128), (1, 2, 77, 64), np.tri(90, 77, -3) > 0),
    sample((2, 4, 1, 128), (2, 2, 300, 128), (2, 2, 300, 128), booleans(2, 1, 1, 300), enable_gqa=True),
)
