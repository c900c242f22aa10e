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
from ...random import DROPOUT, Rng
from ..common.drawn import drawn_next
from .operands import Dropout, Inputs, Saved

_BLOCK_BYTES = 1 << 26  # one block of scores, over all batches and heads, stays below this


def _blocks(query: Array, key: Array, dropped: bool) -> Iterator[slice]:
    """Ranges of query rows whose scores, and random numbers for dropout if any, fit the block size."""
    row = max(1, math.prod(query.shape[:-2]) * key.shape[-2] * (64 if dropped else query.itemsize))
    step = max(1, _BLOCK_BYTES // row)
    n = query.shape[-2]
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


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
    key_value_seq_lengths: Array | None = None,
    rng: Rng | None = None,
    stream: int = DROPOUT,
) -> tuple[Array, Array]:
    """softmax(query @ key^T * scale + mask) @ value, per head; scale is 1 / sqrt(head dim) unless given

    A boolean mask says where to look, any other is added to the scores; a query that may look nowhere gets zeros.
    With enable_gqa, key and value have fewer heads (dim -3), each for as many queries' heads in a row
    (arXiv 2305.13245). With dropout_p, each probability is zeroed with it and the others divided by 1 - dropout_p.
    Which ones is said by `rng`, whose samples are query's first dim, and `stream`, as in `dropout`.

    With key_value_seq_lengths, as in JAX, what stands behind a sample's first keys is padding: no query looks at it.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        value: (..., S, V).
        attn_mask: broadcasts to (..., L, S), or None.
        dropout_p: the probability that a probability is zeroed.
        is_causal: whether query i looks at keys 0 to i alone.
        scale: factor of the scores; None: 1 / sqrt(E).
        enable_gqa: whether key and value have fewer heads, dim -3, than query.
        key_value_seq_lengths: of each sample, the first dim of query, how many keys it has, whole numbers; None: all.
        rng: the random numbers of a step; None: those after `manual_seed`.
        stream: the number of this dropout among those of a network.

    Returns:
        (..., L, V), and the log-sum-exp of each row of scores, (..., L, 1).

    Raises:
        ShapeError: the shapes do not fit, the mask holds whole numbers, or the lengths do not.
        ValueError: `dropout_p` is no probability, or lacks its `rng`.
    """
    inputs = Inputs(query, key, value, attn_mask, is_causal, scale, enable_gqa, key_value_seq_lengths)
    dropout = Dropout(dropout_p, rng, stream)
    inputs.check()
    if attn_mask is not None and attn_mask.dtype.kind in "iu":
        raise ShapeError(
            "scaled_dot_product_attention: expected a mask of truth values or of numbers to add to the scores, "
            f"got {attn_mask.dtype.name}; mask != 0 makes truth values of it"
        )
    dropout.check(query)
    shape = (*query.shape[:-1], value.shape[-1])
    a = inputs.by_group()
    out = xp.empty((*a.query.shape[:-1], a.value.shape[-1]), query.dtype)
    lse = xp.empty((*a.query.shape[:-1], 1), query.dtype)
    for rows in _blocks(a.query, a.key, dropout_p > 0.0):
        s = a.scores(xp, rows)
        top = xp.max(s, axis=-1, keepdims=True)
        top = xp.where(top == -math.inf, 0.0, top)
        e = xp.exp(s - top)
        total = xp.sum(e, axis=-1, keepdims=True)
        blind = total == 0.0
        total = xp.where(blind, 1.0, total)
        kept = dropout.kept(xp, e, query.shape, rows)
        if kept is not None:
            e *= kept
        out[..., rows, :] = xp.matmul(e, a.value) / total
        lse[..., rows, :] = xp.where(blind, math.inf, top + xp.log(total))
    return out.reshape(shape), lse.reshape(*shape[:-1], 1)


@scaled_dot_product_attention.vjp("query", "key", "value")
def _(xp: Namespace, g: Array, inputs: Inputs, saved: Saved, dropout: Dropout) -> tuple[Array, Array, Array]:
    a, shapes = inputs.by_group(), (inputs.query.shape, inputs.key.shape, inputs.value.shape)
    g, out, lse = (x.reshape(*a.query.shape[:-1], x.shape[-1]) for x in (g, saved.out, saved.lse))
    dq, dk, dv = xp.empty(a.query.shape, g.dtype), xp.zeros(a.key.shape, g.dtype), xp.zeros(a.value.shape, g.dtype)
    delta = xp.sum(g * out, axis=-1, keepdims=True)
    for rows in _blocks(a.query, a.key, dropout.dropout_p > 0.0):
        p = xp.exp(a.scores(xp, rows) - lse[..., rows, :])
        gr = g[..., rows, :]
        dp, used = xp.matmul(gr, a.value.swapaxes(-1, -2)), p
        kept = dropout.kept(xp, p, inputs.query.shape, rows)
        if kept is not None:
            dp, used = dp * kept, p * kept
        ds = p * (dp - delta[..., rows, :]) * a.factor
        dv += _over_group(xp, xp.matmul(used.swapaxes(-1, -2), gr), a.enable_gqa)
        dq[..., rows, :] = xp.matmul(ds, a.key)
        dk += _over_group(xp, xp.matmul(ds.swapaxes(-1, -2), a.query[..., rows, :]), a.enable_gqa)
    return dq.reshape(shapes[0]), dk.reshape(shapes[1]), dv.reshape(shapes[2])


@scaled_dot_product_attention.vjp("attn_mask")
def _(xp: Namespace, g: Array, inputs: Inputs, saved: Saved, dropout: Dropout) -> Array:
    # Unlike the other gradients this one takes memory for all scores at once: for learnt biases of short sequences.
    a, shape = inputs.by_group(), (*inputs.query.shape[:-1], inputs.key.shape[-2])
    g, out, lse = (x.reshape(*a.query.shape[:-1], x.shape[-1]) for x in (g, saved.out, saved.lse))
    every = slice(0, a.query.shape[-2])
    p = xp.exp(a.scores(xp, every) - lse)
    dp = xp.matmul(g, a.value.swapaxes(-1, -2))
    kept = dropout.kept(xp, p, inputs.query.shape, every)
    if kept is not None:
        dp = dp * kept
    return (p * (dp - xp.sum(g * out, axis=-1, keepdims=True))).reshape(shape)


scaled_dot_product_attention.non_differentiable("key_value_seq_lengths")


def _over_group(xp: Namespace, g: Array, grouped: bool) -> Array:
    """Returns the gradient of a key's head, summed over the queries' heads that share it."""
    return xp.sum(g, axis=-3, keepdims=True) if grouped else g


_LENGTHS = np.array([300, 7])


def _rng(samples: int) -> Rng:
    return Rng(NUMPY, 7, 3, np.arange(samples))


scaled_dot_product_attention.fill_in = drawn_next("dropout_p")
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
    sample((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), key_value_seq_lengths=np.array([5, 2])),
    sample(
        (2, 4, 3, 2),
        (2, 2, 4, 2),
        (2, 2, 4, 3),
        (3, 4),
        0.0,
        True,
        enable_gqa=True,
        key_value_seq_lengths=np.array([1, 3]),
    ),
)
scaled_dot_product_attention.errors(
    ErrorSample(sample((2, 4), (3, 5), (3, 5)), ShapeError, r"got \(2, 4\), \(3, 5\), \(3, 5\)"),
    ErrorSample(sample((4,), (3, 4), (3, 4)), ShapeError, r"got \(4,\), \(3, 4\)"),
    ErrorSample(sample((3, 2, 4), (2, 2, 4), (2, 2, 4), enable_gqa=True), ShapeError, r"got \(3, 2, 4\)"),
    ErrorSample(sample((2, 4), (2, 4), (2, 4), dropout_p=1.5), ValueError, r"in \[0, 1\], got 1.5"),
    ErrorSample(sample((2, 4), (2, 4), (2, 4), integers(2, 2, 2)), ShapeError, "a mask of truth .*, got int64"),
    ErrorSample(
        sample((2, 3, 4), (2, 5, 4), (2, 5, 4), key_value_seq_lengths=integers(5, 3)),
        ShapeError,
        r"one for each sample of query \(2, 3, 4\), got \(3,\) of int64",
    ),
    ErrorSample(
        sample((2, 3, 4), (2, 5, 4), (2, 5, 4), key_value_seq_lengths=(2,)), ShapeError, "whole numbers, .* of float64"
    ),
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
    sample((2, 4, 130, 128), (2, 2, 300, 128), (2, 2, 300, 128), enable_gqa=True, key_value_seq_lengths=_LENGTHS),
    sample((2, 4, 300, 64), (2, 4, 300, 64), (2, 4, 300, 64), None, 0.0, True, key_value_seq_lengths=_LENGTHS),
    sample((2, 4, 150, 64), (2, 4, 77, 64), (2, 4, 77, 64), None, 0.1, rng=_rng(2)),
    sample(
        (2, 4, 70, 128), (2, 2, 90, 128), (2, 2, 90, 128), booleans(70, 90), 0.3, True, enable_gqa=True, rng=_rng(2)
    ),
    sample((2, 2, 65, 80), (2, 2, 130, 80), (2, 2, 130, 40), (2, 1, 1, 130), 0.5, rng=_rng(2), stream=20),
    sample((1, 2, 1100, 64), (1, 2, 1000, 64), (1, 2, 1000, 40)),
)
