"""Attention on projected tokens and the feed-forward of a transformer, and what of both is rematerialized.

Shape letters: B batch, L positions of queries, T positions of keys, C channels, H heads, D channels a head.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.engine import Tensor, nn, rematerialize
from flame_train.engine import functional as F

SMALL: Final = 8 << 20
"""Bytes from which a result is made again instead of kept: below, it is a kernel's launch that takes the time."""

LARGE: Final = 64 << 20
"""The same where making it again takes a product."""

remade = partial(rematerialize, min_bytes=SMALL)
remultiplied = partial(rematerialize, min_bytes=LARGE)


def attend(
    q_BLC: Tensor,
    k_BTC: Tensor,
    v_BTC: Tensor,
    heads: int,
    is_causal: bool = False,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns multi-head attention (B, L, C) on projected queries, keys and values.

    The result is rematerialized where the gradients of attention do not need it. That is so for few keys, where
    rematerialization costs about as much as a norm.

    Args:
        q_BLC: queries (B, L, C).
        k_BTC, v_BTC: keys and values (B, T, C).
        heads: number of heads, a divisor of C.
        is_causal: whether a query attends to earlier keys only.
        mask: (B or 1, H or 1, L, T), as for scaled_dot_product_attention.
        scale: factor of the scores; None: 1 / sqrt(C / heads).
    """

    def split(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)

    find = partial(F.scaled_dot_product_attention, is_causal=is_causal, scale=scale)
    return remade(_merged, remade(find, split(q_BLC), split(k_BTC), split(v_BTC), mask))


def _merged(x_BHLD: Tensor) -> Tensor:
    B, H, L, D = x_BHLD.shape
    return x_BHLD.transpose(1, 2).reshape(B, L, H * D)


def feed_forward(first: nn.Linear, second: nn.Linear, x: Tensor) -> Tensor:
    """second(gelu(first(x))), the tanh formula: one op where neither is adapted and both are stored alike.

    Otherwise the input of the second, which its gradient needs, is rematerialized from the output of the first.
    """
    plain = first.adapter is second.adapter is None
    if not plain:
        return second(rematerialize(_gelu, first(x)))
    a, b = (nn.operand(layer.weight, x.dtype) for layer in (first, second))
    a_bias, b_bias = nn.compute_copy(first.bias), nn.compute_copy(second.bias)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return F.feed_forward(x, a, a_bias, b, b_bias)
    if isinstance(a, nn.ScaledWeight) and isinstance(b, nn.ScaledWeight) and a.alike(b):
        layers = a.data, a.scales, a_bias, b.data, b.scales, b_bias
        return F.scaled_feed_forward(x, *layers, dynamic=a.dynamic, rotated=a.rotated)
    return second(rematerialize(_gelu, first(x)))


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
