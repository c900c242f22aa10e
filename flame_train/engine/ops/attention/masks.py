"""A mask as tensor cores take it: numbers to add to scores, with a row for each query or one for all; and lengths."""

from __future__ import annotations

import numpy as np

from ...backend.cuda.launcher import Launcher
from ...dtype import Array, bool_, float32
from .memory_layout import lies_in_packets
from .operands import Inputs

_PACKET = 8  # numbers of 16 bits in 16 bytes
MINUS_INFINITY, _INFINITY = "__int_as_float(0xff800000)", "__int_as_float(0x7f800000)"


def why_not(query: Array, attn_mask: Array | None) -> str:
    """Says why a mask cannot be added by cuDNN; "" if it can, or if there is none."""
    if attn_mask is None:
        return ""
    if attn_mask.ndim > 4:
        return f"a mask of {attn_mask.ndim} dims"
    if attn_mask.dtype not in (bool_, query.dtype):
        return f"a mask of {attn_mask.dtype.name} for queries of {query.dtype.name}: expected bool or theirs"
    return ""


def added(k: Launcher, mask: Array, query: Array, key: Array) -> Array:
    """`mask` as (B or 1, H or 1, L or 1, S) in the queries' dtype: itself, or a copy, where it bars minus infinity.

    A dim along which it is the same has size 1, so that what bars keys alone is made and read as one row.
    """
    whole = k.xp.broadcast_to(mask, (*query.shape[:-1], key.shape[-2]))
    own = whole[tuple(slice(1) if distance == 0 else slice(None) for distance in whole.strides[:3])]
    keys = own.shape[3]
    if own.dtype == query.dtype and lies_in_packets(own):
        return own
    room = k.empty((*own.shape[:3], -(-keys // _PACKET) * _PACKET), query.dtype)[..., :keys]
    value = f"mask != 0.f ? 0.f : {MINUS_INFINITY}" if own.dtype == bool_ else "mask"
    k.elementwise((value,), {"mask": own}, (query.dtype,), out=(room,))
    return room


def part(bias: Array, samples: slice, heads: slice) -> Array:
    """Returns what `added` made, for some samples and heads; a dim of 1 is for all."""
    return bias[samples if bias.shape[0] > 1 else slice(None), heads if bias.shape[1] > 1 else slice(None)]


def lengths(k: Launcher, inputs: Inputs) -> Array | None:
    """Returns how many queries and keys each sample has, int32 (2, B); None where all have all."""
    if inputs.key_value_seq_lengths is None:
        return None
    both = k.xp.empty((2, inputs.query.shape[0]), np.int32)
    both[0], both[1] = inputs.query.shape[2], inputs.key_value_seq_lengths
    return both


def settle_blind_rows(k: Launcher, lse: Array) -> None:
    """Makes the log-sum-exp of a query that may look nowhere infinite, as in the reference: it has no probabilities.

    Where cuDNN found nothing to look at it leaves zeros, as is right, and minus infinity, which makes no gradients.
    """
    k.elementwise((f"lse == {MINUS_INFINITY} ? {_INFINITY} : lse",), {"lse": lse}, (np.dtype(float32),), out=(lse,))
