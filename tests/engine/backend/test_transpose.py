"""Copies to memory of another order, tile by tile: as C++, over arrays that lie in many ways."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flame_train.engine.gradcheck import generator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]

ORDERS = {
    "even": ((2, 66, 3, 36), (0, 2, 3, 1)),
    "odd": ((3, 17, 5, 27), (0, 2, 3, 1)),
    "back": ((2, 9, 4, 66), (0, 3, 1, 2)),
    "matrix": ((70, 129), (1, 0)),
    "several dims around": ((3, 20, 2, 4, 18), (0, 4, 2, 3, 1)),
    "the last two": ((5, 3, 33, 31), (0, 1, 3, 2)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_values_are_where_they_belong(gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    k = gpu.kernels
    drawn = {n: generator(n, 0).standard_normal(shape).astype(dtype) for n, (shape, _) in ORDERS.items()}

    def found() -> dict[str, list[np.ndarray]]:
        made = {}
        for name, (_, order) in ORDERS.items():
            x = gpu.to_device(drawn[name])
            parts = [x, x[..., 1:], x[:, :-1]]  # two of them with odd addresses or steps
            made[name] = [k.contiguous(part.transpose(order)).get() for part in parts]
        return made

    found()
    assert all(kernel == "transpose" for _, kernel in compiled.texts)
    compiled.build()
    for name, arrays in found().items():
        x, order = drawn[name], ORDERS[name][1]
        for got, part in zip(arrays, (x, x[..., 1:], x[:, :-1]), strict=True):
            np.testing.assert_array_equal(got, part.transpose(order))
    assert {"PACK = 1", "PACK = 2"} == {t[t.index("PACK =") :][:8] for t, _ in compiled.texts} or dtype.itemsize == 4


def test_a_target_may_be_part_of_an_array(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    x = generator("part", 0).standard_normal((2, 40, 30)).astype(np.float32)

    def found() -> np.ndarray:
        whole = gpu.to_device(np.zeros((2, 34, 50), np.float32))
        gpu.kernels.copy([whole[:, 2:32, 6:46]], [gpu.to_device(x).transpose(0, 2, 1)])
        return whole.get()

    found()
    compiled.build()
    want = np.zeros((2, 34, 50), np.float32)
    want[:, 2:32, 6:46] = x.transpose(0, 2, 1)
    np.testing.assert_array_equal(found(), want)


def test_what_is_copied_in_rows_or_is_small_is_left_to_packets(gpu: Any) -> None:
    x = gpu.empty((6, 40, 50), np.dtype(np.float32))
    y = gpu.empty((40, 6, 50), np.dtype(np.float32))
    assert not gpu.kernels.transposes(y, x.transpose(1, 0, 2))
    assert not gpu.kernels.transposes(gpu.empty((40, 50, 6), x.dtype), x.transpose(1, 2, 0))
    assert not gpu.kernels.transposes(gpu.empty((6, 40, 50), np.dtype(np.int32)), x)
