"""Which kernels attention has on CUDA, in the order in which they are tried, and how each is called.

bf16 and fp16 go through cuDNN, masks, grouped heads and all, except where a kernel of ours is faster. That is so for
few keys, such as a caption's (short_kv_forward.cuh), and for heads of size 64 on compute capability 9.0 (wgmma.cuh).
Dropout takes the reference, because cuDNN has other random numbers. All else goes through tiled.cuh, up to head sizes
where the reference, whose products cuBLASLt makes, is faster. Products make the gradients of long sequences in fp32 as
well, some queries of some heads at a time: five products are faster by cuBLASLt than by tiled.cuh, whose forward pass
is the faster one. Parts are small, so scores take little memory. Sums have one order. With TF32 chosen they use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...autograd.grad_target import GradTargets
from ...backend.cuda.codegen.kernel_ir import Operands, Program
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.tuning import SM_90
from ...dtype import Array, float32
from ...mode import mode
from ..common import conditions
from . import masks, short_kv, wgmma
from .attention import scaled_dot_product_attention
from .memory_layout import backward_flops, forward_flops, gradient_memory, in_packets, like_rows, unit
from .operands import Inputs, Saved
from .tiled import Problem, backward_tiles, forward_tiles, nowhere

_SCORES_BYTES = 64 << 20
"""Of the scores of a part: what a large card's cache has room for, about."""
_LEAST = 1 << 20
"""Scores of a head; of fewer the products are too small."""
_UNIT = 128
"""Queries, of which a part has a multiple."""
_KEYS = 4
"""Keys, of whose scores a packet of 16 bytes has so many."""
_DELTA = Program(("sum d = g * out",), (), ("d",))
_SLOPES = ("expf(s - lse)", "expf(s - lse) * (d - delta) * factor")

_Block = tuple[slice, slice]
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


def _parts(query: Array, key: Array) -> Iterator[_Block]:
    """Of dense (N, L, E) and (N, S, E), parts whose scores fit: whole heads, or queries of one."""
    (heads, queries), row = query.shape[:2], 4 * key.shape[1]
    together = min(heads, _SCORES_BYTES // (queries * row))
    step = queries if together else max(_UNIT, _SCORES_BYTES // row // _UNIT * _UNIT)
    for head in range(0, heads, max(1, together)):
        for first in range(0, queries, step):
            yield slice(head, min(head + max(1, together), heads)), slice(first, min(first + step, queries))


def _heads(k: Launcher, x: Array) -> Array:
    """Returns `x` (..., L, E) as dense (N, L, E)."""
    return k.contiguous(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def gradients(
    k: Launcher, g: Array, inputs: Inputs, out: Array, lse: Array, needs: frozenset[str]
) -> tuple[Array | None, Array | None, Array | None]:
    """Returns the gradients of query, key and value in their shapes; None for each that is not needed.

    Args:
        g: the gradient of the result (..., L, V).
        inputs: the arguments of attention.
        out, lse: the result, and log-sum-exps of rows (..., L, 1).
        needs: the names of the arguments whose gradients are wanted.
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


Part = tuple[slice, slice, slice]

_TILE = 128  # keys

_MOST_SCORES = 1 << 31


def head_parts(query: Array, key: Array, multiprocessors: int, masked: bool = False) -> list[Part]:
    """Samples, heads of (B, H, L, E) query, all at once or in two parts, and heads of the keys that they look at."""
    batch, heads, length, _ = query.shape
    if masked and batch * heads * length * key.shape[-2] >= _MOST_SCORES:
        return _below_most_scores(query, key)
    if not mode().deterministic or int(query.device.compute_capability) != 90:
        return [(slice(None), slice(heads), slice(key.shape[1]))]
    group = heads // key.shape[1]
    first = larger_part(batch, heads, length, key.shape[-2], query.itemsize, multiprocessors, group)
    parts = [part for part in (slice(first), slice(first, heads)) if part.start != heads]
    return [(slice(None), part, slice((part.start or 0) // group, part.stop // group)) for part in parts]


def _below_most_scores(query: Array, key: Array) -> list[Part]:
    """Returns one sample at a time, and as many of its heads as have fewer than 2^31 scores."""
    (batch, heads, length, _), keys = query.shape, key.shape[-2]
    group = heads // key.shape[1]
    count = max(group, (_MOST_SCORES - 1) // (length * keys) // group * group)
    starts = range(0, heads, count)
    return [
        (slice(i, i + 1), slice(n, min(n + count, heads)), slice(n // group, min(n + count, heads) // group))
        for i in range(batch)
        for n in starts
    ]


def larger_part(
    batch: int, heads: int, queries: int, keys: int, itemsize: int, multiprocessors: int, group: int = 1
) -> int:
    """Returns how many heads are requested at once: the fewest from half of them on that cost no round, or all.

    Heads that share keys, a `group`, stay together.

    Args:
        batch, heads, queries, keys: the sizes B, H, L and S.
        itemsize: bytes of a score.
        multiprocessors: those of the GPU.
        group: heads that share keys.
    """
    if batch * heads * queries * keys * itemsize < SM_90.head_split_bytes:
        return heads

    def rounds(count: int) -> int:
        return -(-batch * count * -(-keys // _TILE) // multiprocessors)

    halves = range(-(-heads // (2 * group)) * group, heads, group)
    return next((n for n in halves if rounds(n) + rounds(heads - n) <= rounds(heads)), heads)


def _flash(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None,
    dropout_p: float,
    enable_gqa: bool,
    key_value_seq_lengths: Array | None,
) -> str:
    """Says why cuDNN's flash attention cannot be used; "" if it can."""
    if dropout_p:
        return "cuDNN drops other probabilities than the reference"
    if not query.ndim == key.ndim == value.ndim == 4 or 0 in (*query.shape, *key.shape, *value.shape):
        return "only (B, H, L, E), and not empty"
    if attn_mask is not None and key_value_seq_lengths is not None:
        return "a mask and lengths of keys at once"
    if query.shape[-2] == key.shape[-2] == 1:
        return "cuDNN has no plan for one query and one key"
    if reason := _head_sizes(query, value):
        return reason
    if reason := conditions.same(conditions.LOW, query, key, value) or masks.why_not(query, attn_mask):
        return reason
    return "" if _capability(query) >= 80 else "cuDNN's attention needs compute capability 8.0"


def _head_sizes(query: Array, value: Array) -> str:
    """Returns those that cuDNN has gradients of too: up to 256 on compute capability 9.0."""
    sizes, most = (query.shape[-1], value.shape[-1]), 256 if _capability(query) == 90 else 128
    if any(n % 8 or n > most for n in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}: expected multiples of 8, at most {most}"
    return ""


def _flash_with_mask(query: Array, attn_mask: Array | None) -> str:
    """Says why cuDNN's gradients do not include the mask's; "" if they do."""
    if attn_mask is None:
        return "no mask"
    return "" if _capability(query) == 90 else "cuDNN's gradient of a mask was seen on compute capability 9.0 alone"


def _plain(query: Array, key: Array, value: Array, attn_mask: Array | None, key_value_seq_lengths: Array | None) -> str:
    """Says why our kernels for flash attention cannot be used; "" if they can."""
    return "no mask" if attn_mask is not None else _alike(query, key, value, key_value_seq_lengths)


def _alike(query: Array, key: Array, value: Array, key_value_seq_lengths: Array | None) -> str:
    """Says why our gradients for flash attention, which take some masks, cannot be used; "" if they can."""
    if key_value_seq_lengths is not None:
        return "no lengths of keys"
    if query.shape[1] != key.shape[1]:
        return "no grouped heads"
    return "" if query.shape[-1] == value.shape[-1] else "values of another head size"


def _capability(x: Array) -> int:
    return int(x.device.compute_capability)


_short_kv = (_flash, _plain, short_kv.why_not)

_wgmma, _wgmma_back = (_flash, _plain, wgmma.why_not_forward), (_flash, _alike, wgmma.why_not_gradients)

_masked = (_flash, _flash_with_mask)


@scaled_dot_product_attention.cuda("short_kv", when=_short_kv)
def _(k: Launcher, inputs: Inputs) -> tuple[Array, Array]:
    inputs.check()
    query = inputs.query
    out, lse = like_rows(k, query), k.empty((*query.shape[:-1], 1), np.dtype(np.float32))
    short_kv.forward(k, query, inputs.key, inputs.value, out, lse, inputs.factor)
    return out, lse


@scaled_dot_product_attention.cuda("wgmma", when=_wgmma)
def _(k: Launcher, inputs: Inputs) -> tuple[Array, Array]:
    inputs.check()
    query, key, value = (in_packets(k, x) for x in (inputs.query, inputs.key, inputs.value))
    out, lse = like_rows(k, query), k.empty((*query.shape[:-1], 1), np.dtype(np.float32))
    wgmma.forward(k, query, key, value, out, lse, inputs.factor)
    return out, lse


@scaled_dot_product_attention.cuda("cudnn", when=_flash)
def _(k: Launcher, inputs: Inputs) -> tuple[Array, Array]:
    inputs.check()
    q, key, value = (unit(k, x) for x in (inputs.query, inputs.key, inputs.value))
    bias = None if inputs.attn_mask is None else masks.added(k, inputs.attn_mask, q, key)
    out, lse = like_rows(k, q, value.shape[-1]), k.empty((*q.shape[:-1], 1), np.dtype(np.float32))
    lengths = masks.lengths(k, inputs)
    k.cudnn.attention_forward(q, key, value, out, lse, inputs.factor, inputs.is_causal, bias, lengths)
    if bias is not None or lengths is not None:
        masks.settle_blind_rows(k, lse)
    return out, lse


@scaled_dot_product_attention.cuda_vjp("short_kv", "query", "key", "value", when=_short_kv)
def _(k: Launcher, g: Array, inputs: Inputs, lse: Array) -> tuple[Array, Array, Array]:
    dq, dk, dv = (like_rows(k, x) for x in (inputs.query, inputs.key, inputs.value))
    short_kv.gradients(k, g, inputs, lse, (dq, dk, dv))
    return dq, dk, dv


@scaled_dot_product_attention.cuda_vjp("wgmma", "query", "key", "value", when=_wgmma_back, accumulates=False)
def _(k: Launcher, g: Array, inputs: Inputs, saved: Saved, targets: GradTargets) -> tuple[Array, Array, Array]:
    dq, dk, dv = gradient_memory(k, inputs, targets)
    wgmma.gradients(k, g, inputs, saved, (dq, dk, dv))
    return dq, dk, dv


@scaled_dot_product_attention.cuda_vjp("cudnn", "query", "key", "value", "attn_mask", when=_masked, accumulates=False)
def _(
    k: Launcher, g: Array, inputs: Inputs, saved: Saved, needs: frozenset[str], targets: GradTargets
) -> tuple[Array | None, ...]:
    query, key = inputs.query, inputs.key
    bias, g_bias = masks.added(k, inputs.attn_mask, query, key), None
    if "attn_mask" in needs:
        g_bias = k.empty((*bias.shape[:2], query.shape[2], key.shape[2]), query.dtype)
    return *_by_cudnn(k, g, inputs, saved, targets, bias, g_bias), g_bias


@scaled_dot_product_attention.cuda_vjp("cudnn", "query", "key", "value", when=_flash, accumulates=False)
def _(k: Launcher, g: Array, inputs: Inputs, saved: Saved, targets: GradTargets) -> tuple[Array | None, ...]:
    mask = inputs.attn_mask
    bias = None if mask is None else masks.added(k, mask, inputs.query, inputs.key)
    return tuple(_by_cudnn(k, g, inputs, saved, targets, bias))


def _by_cudnn(
    k: Launcher,
    g: Array,
    inputs: Inputs,
    saved: Saved,
    targets: GradTargets,
    bias: Array | None,
    g_bias: Array | None = None,
) -> list[Array]:
    """Returns the gradients of query, key and value; fills `g_bias`, if given, with that of the bias."""
    into, lengths = gradient_memory(k, inputs, targets), masks.lengths(k, inputs)
    if lengths is not None:
        for gradient in into[1:]:  # cuDNN leaves that of padding as it was
            k.elementwise(("0.f",), {}, (gradient.dtype,), out=(gradient,))
    q, key, value, g = (unit(k, x) for x in (inputs.query, inputs.key, inputs.value, g))
    if g_bias is not None:  # which sums over what shares a row of the mask
        parts = [(slice(None), slice(None), slice(None))]
    else:
        parts = head_parts(q, key, k.multiprocessors, bias is not None)
    for samples, heads, groups in parts:
        lengths_ = None if lengths is None else lengths[:, samples]
        of_queries = (x[samples, heads] for x in (q, saved.out, saved.lse, g, into[0]))
        of_keys = (x[samples, groups] for x in (key, value, *into[1:]))
        (q_, out_, lse_, g_, dq), (key_, value_, dk, dv) = of_queries, of_keys
        bias_ = None if bias is None else masks.part(bias, samples, heads)
        lse_, factor, causal = k.contiguous(lse_), inputs.factor, inputs.is_causal
        k.cudnn.attention_backward(
            q_, key_, value_, out_, lse_, g_, dq, dk, dv, factor, causal, bias_, g_bias, lengths_
        )
    return into


@scaled_dot_product_attention.cuda_vjp("products", "query", "key", "value", when=why_not)
def _(
    k: Launcher, g: Array, inputs: Inputs, saved: Saved, needs: frozenset[str]
) -> tuple[Array | None, Array | None, Array | None]:
    return gradients(k, g, inputs, saved.out, saved.lse, needs)


@scaled_dot_product_attention.cuda("flame", when=forward_tiles)
def _(k: Launcher, inputs: Inputs) -> tuple[Array, Array]:
    inputs.check()
    query, value = inputs.query, inputs.value
    problem = Problem(k, inputs)
    k.launch_hooks.multiplied("attention", forward_flops(query, inputs.key, value))
    lse = k.empty((*query.shape[:-1], 1), np.dtype(np.float32))
    out = k.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
    return problem.run("attention_forward", nowhere(), lse, nowhere(), out), lse


@scaled_dot_product_attention.cuda_vjp("flame", "query", "key", "value", when=backward_tiles)
def _(
    k: Launcher, g: Array, inputs: Inputs, saved: Saved, needs: frozenset[str]
) -> tuple[Array | None, Array | None, Array | None]:
    wanted = (("query", inputs.query), ("key", inputs.key), ("value", inputs.value))
    problem = Problem(k, inputs, g, saved.out)
    k.launch_hooks.multiplied("attention", backward_flops(inputs.query, inputs.key, inputs.value))
    g, out = problem.others
    delta = problem.delta(g, out)
    dq, dk, dv = (
        problem.run(f"attention_{name}", g, saved.lse, delta, k.empty(x.shape, x.dtype)) if name in needs else None
        for name, x in wanted
    )
    return dq, dk, dv
