"""The kernels that draw random numbers, without a GPU: compiled as C++, the same bits as NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.nvrtc import included
from flame_train.engine.dtype import float32
from flame_train.engine.random import Rng, _source, bits, normal_of


@pytest.fixture
def xp(computing: Any, written_out: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in's arrays, with the kernels run for them."""

    def generated(text: str, kernel: str) -> Any:
        assert text == _source()
        run = written_out.get(included(text), kernel, float32, 0)
        return lambda grid, block, args: run(grid, block, args, 0)

    monkeypatch.setattr(computing.kernels._modules, "generated", generated)
    return computing.xp


@pytest.mark.parametrize("seed", [42, 2**63 + 5, -3])
@pytest.mark.parametrize("count", [0, 1, 36, 1030])
def test_words(xp: Any, seed: int, count: int) -> None:
    samples = np.array([0, 5, 2**31 + 1, 2**32 - 1], np.int64)
    for step in (0, 2**32 - 1, np.asarray(5, np.int32)):
        wanted = bits(np, seed, 9, step, samples, count)
        for place in (step, np.asarray(step), xp.asarray(step)):  # a number, on the host, on the device
            np.testing.assert_array_equal(bits(xp, seed, 9, place, xp.asarray(samples), count), wanted)


def test_draws(xp: Any) -> None:
    here, there = Rng(np, 7, 2, np.arange(3)), Rng(xp, 7, xp.asarray(2), xp.arange(3))
    for shape in ((), (5,), (8, 8, 4)):
        np.testing.assert_array_equal(there.normal(20, shape), here.normal(20, shape))
        np.testing.assert_array_equal(there.uniform(20, shape), here.uniform(20, shape))


def test_normals_of_all_regions(xp: Any) -> None:
    rng = np.random.default_rng(0)
    edges = [np.arange(3000), 2**32 - 1 - np.arange(3000), 2**31 + np.arange(-50, 50), rng.integers(0, 2**32, 20_000)]
    words = np.concatenate(edges).astype(np.uint32)
    assert np.asarray(normal_of(xp, xp.asarray(words))).tobytes() == normal_of(np, words).tobytes()
