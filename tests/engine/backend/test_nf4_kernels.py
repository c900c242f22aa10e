"""The kernels of 4-bit weights, run as C++: the bits of the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

BF16 = np.dtype(ml_dtypes.bfloat16)


def weights() -> dict[str, np.ndarray]:
    """Normal; with outliers, zeros, numbers on the middles between codes; of one magnitude; in 16 bits."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((300, 192)).astype(np.float32)
    odd = normal[:34].copy()
    odd[3], odd[7, ::17], odd[5] = 0.0, 40.0, 1e-40
    odd[6] = np.resize(np.float32([1.0, 0.2035212516784668, -0.3396794348955154, -1.0]), 192)
    return {"normal": normal, "odd": odd, "alike": np.ones((2, 64), np.float32), "bf16": normal.astype(BF16)}


def run(weight: np.ndarray, device: str, dtype: Any) -> list[np.ndarray]:
    parts = F.nf4_quantize(flame.tensor(weight, weight.dtype, device))
    back = F.nf4_dequantize(*parts, weight.shape, dtype)
    return [part.numpy() for part in (*parts, back)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first run computes with what memory holds
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=lambda d: d.name)
def test_kernels_give_the_bits_of_the_reference(
    gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    for weight in weights().values():
        run(weight, "cuda", dtype)
    compiled.build()
    for name, weight in weights().items():
        for want, got in zip(run(weight, "cpu", dtype), run(weight, "cuda", dtype), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name)
