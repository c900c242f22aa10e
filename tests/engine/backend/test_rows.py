"""What row kernels are compiled for and told: few cuts for many shapes, and divisors that divide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda.codegen.row_tiling import (
    RowTiling,
    halved_tiling,
    row_tiling,
    staged_tiling,
)
from flame_train.engine.backend.cuda.codegen.rows import divisor


@pytest.mark.parametrize("by", [1, 2, 3, 7, 24, 77, 4608, 65_537, 2**30 + 1, 2**31 - 1, 2**31])
def test_a_divisor_divides_all_row_numbers(by: int) -> None:
    _, magic, shift = map(int, divisor(by))
    rng = np.random.default_rng(by)
    edges = [k * by + d for k in (1, 2, 3, 1000) for d in (-1, 0, 1)]
    for a in [0, 1, 2**31 - 1, *edges, *map(int, rng.integers(0, 2**31, 1000))]:
        if 0 <= a < 2**31:
            assert ((a * magic >> 32) + a) >> shift == a // by


def test_one_kernel_for_any_number_of_rows_and_for_lengths_that_are_cut_alike(gpu: Any) -> None:
    compiled = gpu.kernels._modules._generated

    def texts(*shapes: tuple[int, ...]) -> int:
        before = len(compiled)
        for shape in shapes:
            x = flame.tensor(np.ones(shape, np.float32), device="cuda")
            F.softmax(x, -1)
            F.rms_norm_rope(x, None, *[flame.tensor(np.ones(shape[-2:], np.float32), device="cuda")] * 2)
        return len(compiled) - before

    assert texts((2, 30, 128)) == 2
    assert texts((5, 30, 128), (2, 7, 128), (3, 1001, 128)) == 0
    assert texts((2, 30, 250)) > 0
    assert texts((2, 30, 254), (2, 30, 246)) == 0


def test_cuts_have_room_for_a_row_and_waste_nothing_on_lengths_of_models() -> None:
    for columns in range(8, 9000, 8):
        for loads in (1, 2, 3, 4):
            tiling = row_tiling(columns, 8, loads, loads + 2)
            assert columns <= tiling.elements
            assert columns >= tiling.width * tiling.threads * (tiling.packets - 1), (
                "only a thread's last packet may be missing"
            )
            assert tiling.block <= 1024
    for columns in (64, 128, 320, 640, 1280, 1536, 2048, 3072, 4096):
        assert row_tiling(columns, 8, 1, 3).elements == columns
    assert row_tiling(1280, 8, 2, 2) == RowTiling(8, 160, 1)


def test_threads_have_both_halves_of_a_pair() -> None:
    for columns in range(8, 520, 8):
        for width in (1, 2, 4, 8):
            if columns // 2 % width == 0:
                tiling = halved_tiling(columns, width)
                assert tiling.elements == columns
                assert tiling.packets % 2 == 0
                assert tiling.threads & (tiling.threads - 1) == 0
    assert halved_tiling(128, 8) == RowTiling(8, 8, 2)


def test_halves_of_rows_that_lie_apart_and_of_few_packets_are_rotated(
    gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads out of one product's columns, and rows from an address that allows packets of two elements only."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((2, 5, 3 * 4 * 24 + 2)).astype(np.float32)
    turns = [rng.standard_normal((5, 1, 24)).astype(np.float32) for _ in range(2)]

    def found(device: str, start: int) -> np.ndarray[Any, Any]:
        x = flame.tensor(wide, device=device)[:, :, start : start + 96].reshape(2, 5, 4, 24)
        return F.rope(x, *(flame.tensor(t, device=device) for t in turns), False).numpy()

    for start in (0, 2, 96):
        found("cuda", start)
    compiled.build()
    for start in (0, 2, 96):
        np.testing.assert_allclose(found("cuda", start), found("cpu", start), rtol=1e-6, atol=1e-6)
    assert sum("? -v_x[(k" in text for text, _ in compiled.texts) == 2


def test_staged_rows_fit_shared_memory() -> None:
    for columns in range(1, 700):
        tiling = staged_tiling(columns, 1, 16)
        assert tiling is None or (tiling.elements >= columns and tiling.elements * tiling.rows * 16 <= 32 << 10)
        assert tiling is None or columns >= tiling.threads * (tiling.packets - 1)
    assert staged_tiling(77, 1, 4) == RowTiling(1, 8, 10, staged=True)
    assert staged_tiling(80, 8, 4) is None
