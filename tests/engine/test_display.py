"""What print shows of a tensor."""

from __future__ import annotations

import numpy as np

import flame_train.engine as flame
from flame_train.engine.mode import capturing


def test_small_tensors_show_their_values() -> None:
    assert repr(flame.tensor(3)) == "Tensor(3, dtype=int64, device='cpu')"
    assert "1.5" in repr(flame.tensor([1.5], dtype="bfloat16"))
    assert repr(flame.zeros(0, 3)) == "Tensor([], shape=(0, 3), dtype=float32, device='cpu')"


def test_large_tensors_show_what_numpy_shows_of_them() -> None:
    for shape in ((2000,), (60, 70), (5, 1, 400), (9, 9, 9, 9)):
        values = np.arange(np.prod(shape)).reshape(shape)
        want = np.array2string(values, separator=", ", threshold=1000, prefix=" " * 7)
        assert repr(flame.tensor(values)) == f"Tensor({want}, shape={shape}, dtype=int64, device='cpu')"


def test_nothing_is_read_while_a_step_is_captured() -> None:
    with capturing():
        assert repr(flame.zeros(2)) == "Tensor(shape=(2,), dtype=float32, device='cpu')"
