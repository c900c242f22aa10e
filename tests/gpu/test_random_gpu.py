"""Random numbers are the same bits on the GPU and on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend import get_backend
from flame_train.engine.random import Rng, bits, normal_of

pytestmark = pytest.mark.gpu


def same(host: np.ndarray[Any, Any], device: Any) -> bool:
    got = get_backend("cuda").to_host(device)
    return got.dtype == host.dtype and got.tobytes() == host.tobytes()


@pytest.mark.parametrize("seed", [0, 42, 2**63 + 5, -3])
@pytest.mark.parametrize("count", [0, 1, 7, 4096])
def test_words(seed: int, count: int) -> None:
    xp, samples = get_backend("cuda").xp, np.array([0, 5, 2**31 + 1, 2**32 - 1], np.int64)
    for step in (0, 3, np.asarray(2**32 - 1, np.int64), np.asarray(7, np.int32)):
        there = step if isinstance(step, int) else xp.asarray(step)
        assert same(bits(np, seed, 9, step, samples, count), bits(xp, seed, 9, there, xp.asarray(samples), count))


def test_draws() -> None:
    xp = get_backend("cuda").xp
    here, there = Rng(np, 7, 2, np.arange(3)), Rng(xp, 7, xp.asarray(2), xp.arange(3))
    for shape in ((), (5,), (64, 64, 4)):
        assert same(here.uniform(20, shape), there.uniform(20, shape))
        assert same(here.normal(20, shape), there.normal(20, shape))
        assert same(here.randint(20, 1000, shape), there.randint(20, 1000, shape))


def test_normals_of_all_regions() -> None:
    xp, rng = get_backend("cuda").xp, np.random.default_rng(0)
    edges = np.concatenate([np.arange(70_000), 2**32 - 1 - np.arange(70_000), 2**31 + np.arange(-500, 500)])
    words = np.concatenate([edges, rng.integers(0, 2**32, 1_000_000)]).astype(np.uint32)
    assert same(normal_of(np, words), normal_of(xp, xp.asarray(words)))
