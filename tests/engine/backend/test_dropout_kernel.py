"""Dropout's kernel, without a GPU: compiled as C++, the same bits as NumPy's wherever the random numbers' step lies."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.gradcheck import generator
from flame_train.engine.random import Rng

pytestmark = [pytest.mark.usefixtures("compiler")]
BF16 = np.dtype(ml_dtypes.bfloat16)


SHAPES = [(3, 71), (2, 5, 7, 8), (4, 130), (1, 4097), (3,)]
CHANCES = (0.25, 0.9, 1.0, 1.0 - 2.0**-40)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=lambda d: d.name)
def test_bits_are_numpys(gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)

    def found(device: str, xp: Any, shape: tuple[int, ...], p: float, step: Any) -> list[np.ndarray[Any, Any]]:
        rng = generator("dropout", sum(shape))
        drawn, weight = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
        x = flame.tensor(drawn, device=device, requires_grad=True)
        numbers = Rng(xp, 2**63 + 5, step, xp.asarray(rng.integers(0, 2**32, shape[0])))
        made = [F.dropout(x, p, rng=numbers, stream=2**31 + 3) for _ in range(2)]
        g = flame.tensor(weight, device=device)
        once = flame.grad(made[0], [x], [g], retain_graph=True)[0]
        twice = flame.grad(made, [x], [g, g])[0]
        return [np.asarray(t.numpy(), np.float64) for t in (made[0], once, twice)]

    # The step is a number of the host's, or one that a captured step counts up.
    cases = [*itertools.product(SHAPES, CHANCES, (9, gpu.xp.asarray(9)))]
    for case in cases:
        found("cuda", gpu.xp, *case)
    compiled.build()
    for shape, p, step in cases:
        got, want = found("cuda", gpu.xp, shape, p, step), found("cpu", np, shape, p, 9)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_allclose(got[2], want[2], rtol=float(ml_dtypes.finfo(dtype).eps))


def test_a_gradient_is_added_where_it_has_arrived(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the wider dtype of what has arrived."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    drawn = generator("dropout", 0).standard_normal((2, 48)).astype(BF16)

    def found(device: str, xp: Any) -> np.ndarray[Any, Any]:
        x = flame.tensor(drawn, device=device, requires_grad=True)
        x.grad = flame.tensor(np.arange(96, dtype=np.float32).reshape(2, 48) / 7.0, device=device)
        for stream in (20, 21):
            F.dropout(x, 0.25, rng=Rng(xp, 7, 3, xp.arange(2)), stream=stream).sum().backward()
        assert x.grad.dtype == np.float32
        return np.asarray(x.grad.numpy())

    found("cuda", gpu.xp)
    compiled.build()
    np.testing.assert_allclose(found("cuda", gpu.xp), found("cpu", np), rtol=2.0**-7)
