"""A training step of each family on a card without the products of warpgroups: all launches fit it."""

from __future__ import annotations

from typing import Any

import pytest

from flame_train.engine import dispatch
from flame_train.engine.backend.shapes.driver import RTX_3090
from flame_train.models.registry import FAMILIES
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("model", sorted(family.small for family in FAMILIES.values()))
def test_products_in_8_bits_are_kernels(gpu: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their references round in many passes, and copy from the host, which no captured step may."""
    monkeypatch.setattr(Products, "product", lambda *_, **__: None)
    slow: list[str] = []
    reference = dispatch._reference
    monkeypatch.setattr(dispatch, "_reference", lambda op, *rest: slow.append(op.name) or reference(op, *rest))
    bench.prepare(bench.BenchCase(model, resolution=128, quantize="int8-convrot", arithmetic="int8")).step()
    assert [name for name in slow if name.startswith("scaled_")] == []
