"""Attention's gradients with each kind of mask, causal or not, with grouped heads or not, with dropout or not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine.gradcheck import gradcheck
from flame_train.engine.op import sample
from flame_train.engine.op_samples import booleans
from flame_train.engine.random import Rng

B, HEADS, E = 2, 4, 2


def pairs(queries: int, keys: int) -> np.ndarray:
    """With a query that may look nowhere, and one that may look nowhere but ahead."""
    seen = np.ones((queries, keys), bool)
    seen[1], seen[2, :3] = False, False
    return seen


MASKS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda queries, keys: None,
    "keys": lambda queries, keys: booleans(B, 1, 1, keys),
    "pairs": pairs,
    "heads": lambda queries, keys: booleans(B, HEADS, queries, keys),
    "added": lambda queries, keys: (1, HEADS, queries, keys),
    "added to pairs": lambda queries, keys: (queries, keys),
    "added to keys": lambda queries, keys: (B, 1, 1, keys),
}
COMBINATIONS = list(product(MASKS, (False, True), (4, 2, 1), (0.0, 0.4), ((3, 5), (5, 4))))


@pytest.mark.parametrize(("mask", "causal", "key_heads", "p", "lengths"), COMBINATIONS)
def test_gradients_meet_finite_differences(
    mask: str, causal: bool, key_heads: int, p: float, lengths: tuple[int, int]
) -> None:
    queries, keys = lengths
    rng = Rng(np, 7, 3, np.arange(B)) if p else None
    query, key = (B, HEADS, queries, E), (B, key_heads, keys, E)
    grouped = key_heads < HEADS
    call = sample(query, key, key, MASKS[mask](queries, keys), p, causal, enable_gqa=grouped, rng=rng)
    assert not [v for v in gradcheck(F.scaled_dot_product_attention, samples=[call]) if not v.passed]
