"""Launches are told to who watches, and are left out where that says so."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.tools.bench_kernels import census, kind_of


def step(dtype: str = "bfloat16") -> None:
    x = flame.tensor(np.ones((4, 16)), dtype, "cuda")
    w = flame.tensor(np.ones((8, 16)), dtype, "cuda")
    q = flame.tensor(np.ones((1, 2, 16, 8)), dtype, "cuda")
    F.silu(F.layer_norm(F.linear(x, w), (8,)))
    F.scaled_dot_product_attention(q, q, q)


def test_every_launch_is_told_and_may_be_left_out(gpu: Any) -> None:
    told: Counter[str] = Counter()

    def watch(name: str, args: Any) -> bool:
        told[name] += 1
        return name != "rows"

    with gpu.kernels.launches.watched(watch):
        step()
        assert told["rows"] == told["elementwise"] == 1
        step()
    assert told["rows"] == 2
    step()
    assert told["rows"] == 2
    assert {kind_of(name) for name in told} == {"norms and other rows", "elementwise"}


def test_a_census_counts_launches_and_bytes_once_each(gpu: Any) -> None:
    x = flame.tensor(np.ones((4, 16)), "float32", "cuda")
    y = flame.tensor(np.ones((1, 16)), "float32", "cuda")
    found = census(lambda: F.mul(x, y), gpu)
    assert found["elementwise"] == (1, 4 * (64 + 16 + 64))
    assert sum(launches for launches, _ in found.values()) == 1
