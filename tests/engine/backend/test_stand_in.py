"""What stands in for CuPy reads every array that CuPy would."""

from __future__ import annotations

import mmap
import random
from typing import Any

import numpy as np

from tests.engine.backend.stand_in import on_device


def test_two_arrays_seen_as_one_are_copied_wherever_the_copy_lies() -> None:
    """NumPy itself crashes at times where it lies between them."""
    rng, kept, maps = random.Random(1), list[Any](), [mmap.mmap(-1, 1 << 20) for _ in range(4)]

    def drawn(size: int) -> np.ndarray:
        if rng.random() < 0.5:
            return np.zeros(size, np.float32)
        return np.frombuffer(rng.choice(maps), np.float32, size, rng.randrange(0, (1 << 20) - 4 * size, 16))

    for _ in range(20_000):
        rows, width = rng.choice([1, 2, 3, 16, 32]), rng.choice([1, 5, 33, 640])
        first, second = (drawn(rows * width).reshape(rows, width) for _ in range(2))
        step = second.ctypes.data - first.ctypes.data
        if step > 0:
            both = on_device(np.lib.stride_tricks.as_strided(first, (2, rows, width), (step, *first.strides)))
            assert both.transpose(0, 2, 1).astype(np.float64).shape == (2, width, rows)
            np.testing.assert_array_equal(both.get(), np.stack([first, second]))
        if rng.random() < 0.05:
            kept.append(np.zeros(rng.randrange(1, 100_000)))
        if len(kept) > 300:
            kept.clear()
