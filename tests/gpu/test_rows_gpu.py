"""Row kernels on the card at lengths cut in every way: the last block full or not, the last packet there or not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.gradcheck import generator

pytestmark = pytest.mark.gpu

SHAPES = [(163_840, 77), (1027, 77), (5, 9), (333, 131), (1001, 250), (4096, 1280), (1025, 640), (31, 2560), (7, 5000)]


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_and_layer_norm(shape: tuple[int, int], dtype: np.dtype) -> None:
    rng, width = generator("rows", 0), shape[1]
    drawn, weight, bias = ((1.0 + rng.standard_normal(s)).astype(dtype) for s in (shape, width, width))
    x, w, b = (a.astype(np.float64) for a in (drawn, weight, bias))
    e = np.exp(x - x.max(1, keepdims=True))
    far = x - x.mean(1, keepdims=True)
    truths = (e / e.sum(1, keepdims=True), far / np.sqrt((far**2).mean(1, keepdims=True) + 1e-5) * w + b)
    given = [flame.tensor(a, device="cuda") for a in (drawn, weight, bias)]
    found = (F.softmax(given[0], -1), F.layer_norm(given[0], (width,), *given[1:]))
    for got, truth in zip(found, truths, strict=True):
        room = max(float(ml_dtypes.finfo(dtype).eps), 1e-6)
        assert np.linalg.norm(got.numpy().astype(np.float64) - truth) <= room * np.linalg.norm(truth)
