"""Attention in fp32 by matrix products, some queries of some heads at a time, with their scores in memory.

Without TF32 there are no tensor cores for fp32. The gradients' five products are faster by cuBLASLt than by tiled.cuh,
and so are the forward pass's two from heads of 96 on. The scores take little memory, for the parts are small. Sums have
one order. With TF32 chosen the products use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...backend.cuda.codegen.kernel_ir import Operands, Program
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32
from ..common import conditions
from .operands import Inputs

_SCORES_BYTES = 64 << 20
"""Of the scores of a part: what a large card's cache has room for, about."""
_LEAST = 1 << 20
"""Scores of a head; of fewer the products are too small."""
_UNIT = 128
"""Queries, of which a part has a multiple."""
_KEYS = 4
"""Keys, of whose scores a packet of 16 bytes has so many."""
_WIDE = 96
"""The size of a head from which on the forward pass is made so."""
_SOFTMAX = Program(("max m = s", "row e = expf(s - m)", "sum t = e", "let r = 1.f / t"), ("e * r",), ("m + logf(t)",))
_DELTA = Program(("sum d = g * out",), (), ("d",))
_SLOPES = ("expf(s - lse)", "expf(s - lse) * (d - delta) * factor")

Part = tuple[slice, slice]
"""Heads, and queries of them."""


def why_not(inputs: Inputs, dropout_p: float) -> str:
    """Says why gradients are not made by products; "" if they are."""
    query, key, value = inputs.query, inputs.key, inputs.value
    if dropout_p or inputs.is_causal or inputs.attn_mask is not None or inputs.key_value_seq_lengths is not None:
        return "only where each query looks at all keys"
    if min(query.ndim, key.ndim, value.ndim) < 2 or query.shape[:-2] != key.shape[:-2]:
        return "no grouped heads"
    if reason := conditions.same(frozenset({float32}), query, key, value):
        return reason
    if query.shape[-2] * key.shape[-2] < _LEAST or 0 in (*query.shape, *key.shape, *value.shape):
        return f"fewer than {_LEAST} scores of a head"
    return "" if key.shape[-2] % _KEYS == 0 else f"a number of keys that is no multiple of {_KEYS}"


def why_not_forward(inputs: Inputs, dropout_p: float) -> str:
    """Says why the forward pass is not made by products; "" if it is."""
    if reason := why_not(inputs, dropout_p):
        return reason
    widest = max(inputs.query.shape[-1], inputs.value.shape[-1])
    return "" if widest >= _WIDE else f"heads of less than {_WIDE}: tiled.cuh is as fast"


def _parts(query: Array, key: Array) -> Iterator[Part]:
    """Of dense (N, L, E) and (N, S, E), parts whose scores fit: whole heads, or queries of one."""
    (heads, queries), row = query.shape[:2], 4 * key.shape[1]
    together = min(heads, _SCORES_BYTES // (queries * row))
    step = queries if together else max(_UNIT, _SCORES_BYTES // row // _UNIT * _UNIT)
    for head in range(0, heads, max(1, together)):
        for first in range(0, queries, step):
            yield slice(head, min(head + max(1, together), heads)), slice(first, min(first + step, queries))


def _heads(k: Launcher, x: Array) -> Array:
    """`x` (..., L, E) as dense (N, L, E)."""
    return k.contiguous(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def forward(k: Launcher, inputs: Inputs) -> tuple[Array, Array]:
    """Returns the result (..., L, V), and the log-sum-exps of rows (..., L, 1)."""
    query, key, value = (_heads(k, x) for x in (inputs.query, inputs.key, inputs.value))
    out = k.empty((*query.shape[:2], value.shape[-1]), float32)
    lse = k.empty(query.shape[:2], float32)
    for heads, rows in _parts(query, key):
        scores = k.matmul(query[heads, rows], key[heads].swapaxes(1, 2), alpha=inputs.factor)
        weights, sums = k.rows(_SOFTMAX, Operands({"s": scores}), (float32, float32))
        k.copy([lse[heads, rows]], [sums.reshape(scores.shape[:2])])
        k.matmul(weights, value[heads], out=out[heads, rows])
    leading = inputs.query.shape[:-1]
    return out.reshape(*leading, -1), lse.reshape(*leading, 1)


def gradients(
    k: Launcher, g: Array, inputs: Inputs, out: Array, lse: Array, needs: frozenset[str]
) -> tuple[Array | None, Array | None, Array | None]:
    """Returns those of query, key and value, as far as they are needed.

    Args:
        g: the gradient of the result (..., L, V).
        inputs: the arguments of attention.
        out, lse: the result, and log-sum-exps of rows (..., L, 1).
        needs: the names of the arguments whose gradients are wanted.

    Returns:
        Each in its argument's shape, or None.
    """
    named = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    query, key, value = (_heads(k, x) for x in named.values())
    g, out, lse = _heads(k, g), _heads(k, out), _heads(k, lse)
    delta = k.rows(_DELTA, Operands({"g": g, "out": out}), (float32,))[0].reshape(lse.shape)
    made = {name: k.empty(x.shape, float32) for name, x in named.items() if name in needs}
    into = {name: x.reshape(-1, *x.shape[-2:]) for name, x in made.items()}
    for heads, rows in _parts(query, key):
        scores = k.matmul(query[heads, rows], key[heads].swapaxes(1, 2), alpha=inputs.factor)
        slopes = k.matmul(g[heads, rows], value[heads].swapaxes(1, 2))
        of_rows = {"lse": lse[heads, rows], "delta": delta[heads, rows]}
        operands = {"s": scores, "d": slopes, **of_rows, "factor": inputs.factor}
        k.elementwise(_SLOPES, operands, (float32, float32), out=(scores, slopes))
        for name, a, b in (("value", scores, g), ("key", slopes, query)):
            if name in into:
                target = into[name][heads]
                added = target if rows.start else None  # what other queries of these heads have left there
                k.matmul(a.swapaxes(1, 2), b[heads, rows], out=target, plus=added)
        if "query" in into:
            k.matmul(slopes, key[heads], out=into["query"][heads, rows])
    return made.get("query"), made.get("key"), made.get("value")
