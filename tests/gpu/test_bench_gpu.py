"""`bench step` on a GPU: what it counts. What it times is the card's and is not asserted."""

from __future__ import annotations

import pytest

from flame_train.tools import bench

pytestmark = pytest.mark.gpu


def test_a_step_is_broken_down_by_kind_of_kernel() -> None:
    result = bench.step(bench.BenchCase("sdxl-tiny", 128, rank=16), by_kind=True)
    rows = {row["kind"]: row for row in result["kernels"]}
    wanted = {
        "matrix products",
        "attention",
        "convolution",
        "norms and other rows",
        "elementwise",
        "update",
        "the rest",
    }
    assert wanted <= rows.keys()
    assert all(row["launches"] > 0 for row in rows.values())
    assert all(rows[kind]["floor_ms"] >= 0 for kind in wanted)
    assert rows["update"]["launches"] == 3  # the norm, what is decided, and the update with the clipping in it
    assert "below 0" in result["the rest is"]
    assert result["figures"]["healthy"] == 1
