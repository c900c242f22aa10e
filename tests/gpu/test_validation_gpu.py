"""Validation beside a captured run on a GPU: the same trained bytes, the eager step's values, no more memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.engine import capture
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.models.registry import FAMILIES
from flame_train.quickstart.drawings import write_images
from flame_train.run.commands.stages import train
from flame_train.tools import bench
from flame_train.training import validation
from flame_train.training.step import micro, update
from tests.run_files import log_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    """asked(family, name, **sections): a config for a small base of the family."""
    write_images(tmp_path / "images", 12, 1)

    def make(family: str, name: str, **changed: Any) -> dict[str, Any]:
        base = tmp_path / family
        if not (base / "base.safetensors").exists():
            base.mkdir(exist_ok=True)
            FAMILIES[family].write_small_base(base, 3)
        sections: dict[str, dict[str, Any]] = {
            "model": {"checkpoint": str(base / "base.safetensors")},
            "data": {"path": str(tmp_path / "images"), "resolution": 96, "bucket_step": 32, "batch_size": 2},
            "lora": {"rank": 4, "alpha": 4.0},
            "optimizer": {"lr": 1e-3},
            "schedule": {"name": "constant"},
            "train": {"precision": "bf16", "steps": 12},
            "checkpoint": {"every": 0},
            "validation": {"fraction": 0.3, "every": 3},
            "log": {"images_every": 4},
            "output": {"dir": str(tmp_path / name), "title": "tiles"},
        }
        return {n: sections.get(n, {}) | changed.get(n, {}) for n in {**sections, **changed}}

    return make


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_a_captured_run_trains_the_same_bytes_with_and_without(asked: Any, tmp_path: Path, family: str) -> None:
    train(asked(family, "with"), [], "cuda", False)
    off = {"validation": {"every": 0}, "log": {"images_every": 0}}
    train(asked(family, "without", **off), [], "cuda", False)
    for file in ("lora.safetensors", "checkpoints/step-000012/optimizer.safetensors"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes(), file
    told = [line["validation"] for line in log_of(tmp_path / "with") if "validation" in line]
    assert len(told) == 4
    assert all(np.isfinite(one["loss"]) for one in told)
    images = json.loads((tmp_path / "with" / "images.json").read_text())["images"]
    assert images
    assert all(row["seen"] > 0 for row in images)


def test_a_run_that_is_continued_stands_as_one_that_was_not(asked: Any, tmp_path: Path) -> None:
    train(asked("sdxl", "whole"), [], "cuda", False)
    for steps in (5, 9, 12):
        train(asked("sdxl", "parts"), [f"train.steps={steps}"], "cuda", False)
    for name in ("optimizer.safetensors", "state.json", "images.json"):
        files = [tmp_path / run / "checkpoints" / "step-000012" / name for run in ("whole", "parts")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    assert (tmp_path / "whole" / "lora.safetensors").read_bytes() == (
        tmp_path / "parts" / "lora.safetensors"
    ).read_bytes()


def prepared(model: str) -> tuple[Any, validation.Validator]:
    p = bench.prepare(bench.BenchCase(model, 128, batch=2, rank=16))
    arrays = {n: get_backend("cuda").to_host(a) for n, a in p.batch._arrays.items() if n not in ("step", "samples")}
    examples = [{name: a[i] for name, a in arrays.items()} for i in range(2)]
    images = validation.HeldOut.of(examples)
    s = p.state
    made = validation.Validator(
        s.denoiser, s.objective, images, timesteps=4, batch_size=2, device="cuda", dtype=s.dtype
    )
    return p, made


@pytest.mark.parametrize("model", ["sdxl-tiny", "sd3-tiny", "flux-tiny"])
def test_captured_values_are_the_eager_ones_and_follow_the_weights(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with deterministic(True):
        p, captured = prepared(model)
        first = [captured.measure().loss for _ in range(4)]
        assert len(set(first)) == 1  # eager at first, then recorded and replayed
        monkeypatch.setattr(validation, "capture", lambda fn, device: fn)
        s = p.state
        eager = validation.Validator(
            s.denoiser, s.objective, captured._images, timesteps=4, batch_size=2, device="cuda", dtype=s.dtype
        )
        assert eager.measure().loss == first[0]
        steps = capture(lambda: micro(s, p.batch), "cuda"), capture(lambda: update(s), "cuda")
        for _ in range(4):
            for step in steps:
                step()
        after = captured.measure().loss
        assert after == eager.measure().loss
        assert after != first[0]


def test_it_takes_the_memory_that_the_step_has() -> None:
    """After captured steps, a measurement adds its buffers alone: a hundredth of what a step takes."""
    p, validator = prepared("sdxl-tiny")
    backend, s = get_backend("cuda"), p.state
    with deterministic(True):
        steps = capture(lambda: micro(s, p.batch), "cuda"), capture(lambda: update(s), "cuda")
        for _ in range(3):
            for step in steps:
                step()
        backend.synchronize()
        before = backend.memory().peak or 0
        for _ in range(3):
            validator.measure()
            for step in steps:
                step()
        after = backend.memory().peak or 0
    assert after - before <= 0.02 * before + (1 << 20)
