"""The arithmetic of attention, whatever kernel does it: two products forward, and five backward."""

from __future__ import annotations

import math

from ...dtype import Array


def forward_flops(query: Array, key: Array, value: Array) -> int:
    """Of the scores, and of what is found."""
    return 2 * _scores(query, key) * (int(query.shape[-1]) + int(value.shape[-1]))


def backward_flops(query: Array, key: Array, value: Array) -> int:
    """Of the scores once more, of the queries' and keys' gradients, of the probabilities' and of the values'."""
    return 2 * _scores(query, key) * (3 * int(query.shape[-1]) + 2 * int(value.shape[-1]))


def _scores(query: Array, key: Array) -> int:
    return math.prod(query.shape[:-1]) * int(key.shape[-2])
