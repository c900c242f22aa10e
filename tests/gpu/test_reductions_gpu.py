"""Reductions that many blocks share, on the card: the values, and the same bits however the blocks come."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.gradcheck import generator

pytestmark = pytest.mark.gpu

SHAPES = [
    ((16384, 640), 0),
    ((4608, 3072), 0),
    ((110_592, 128), 0),
    ((50_000, 8), 0),
    ((9001, 77), 0),
    ((40, 700, 24), 1),
    ((4608, 3072), None),
    ((3_000_001,), None),
    ((5, 100_000), -1),
    ((5, 77_777), -1),
    ((64, 16), 0),
    ((70_000, 2, 4), 1),
]
OPS: dict[str, tuple[Callable[..., flame.Tensor], Callable[..., np.ndarray]]] = {
    "sum": (F.sum, np.sum),
    "amax": (F.amax, np.max),
    "var": (F.var, lambda x, axis: np.var(x, axis, ddof=1)),
}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=lambda d: d.name)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_values_and_bits(shape: tuple[int, ...], dim: int | None, name: str, dtype: np.dtype) -> None:
    drawn = (1.0 + generator("shared", 0).standard_normal(shape)).astype(dtype)
    ours, theirs = OPS[name]
    x, truth = flame.tensor(drawn, device="cuda"), theirs(drawn.astype(np.float64), axis=dim)
    found = [ours(x, dim).numpy() for _ in range(8)]
    for got in found[1:]:
        np.testing.assert_array_equal(got, found[0])
    room = 0.0 if name == "amax" else 4e-6 + float(ml_dtypes.finfo(dtype).eps)  # fp32 sums, and the dtype
    assert np.linalg.norm(found[0].astype(np.float64) - truth) <= room * np.linalg.norm(truth)


def test_a_replayed_graph_meets_as_eager_calls_between_do() -> None:
    x = flame.tensor(generator("replayed", 0).standard_normal((20_000, 640)).astype(np.float32), device="cuda")
    kept: list[flame.Tensor] = []

    def work() -> None:
        kept[:] = [F.sum(x, 0), F.var(x, 0), F.sum(x), F.var(x)]

    replay = flame.capture(work, "cuda")
    replay()  # eager
    replay()
    held = list(kept)
    for _ in range(3):
        work()
        replay()
    for got, eager in zip(held, kept, strict=True):
        np.testing.assert_array_equal(got.numpy(), eager.numpy())
