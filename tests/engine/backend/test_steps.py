"""A training step of each family on a card without the products of warpgroups: all launches fit it."""

from __future__ import annotations

from typing import Any

import pytest

from flame_train.engine.backend.shapes.driver import RTX_3090
from flame_train.tools import bench
from tests.engine.backend.stand_in import Products


@pytest.fixture
def card() -> Any:
    return RTX_3090


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # zeros where values would be
@pytest.mark.parametrize("model", ["sdxl-tiny", "sd3-tiny", "flux-tiny"])
@pytest.mark.parametrize(
    "how",
    [{}, {"precision": "fp16"}, {"precision": "fp32"}, {"quantize": "fp8"}, {"checkpointing": "offload"}],
    ids=str,
)
def test_a_step_on_an_rtx_3090(gpu: Any, model: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Products, "product", lambda *_, **__: None)
    prepared = bench.prepare(bench.BenchCase(model, resolution=128, **how))
    launched: list[str] = []
    with gpu.kernels.launch_hooks.hooked(lambda name, _: launched.append(name) or True):
        prepared.step()
    assert launched[-3:] == ["squares", "scalars", "adamw"]
    assert "rows" in launched
