"""Predictions that an earlier start kept: taken where the run is the same, made anew where anything differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flame_train.config.schema import Config
from flame_train.engine.shape_run import H100, RTX_3090, Gpu
from flame_train.run.check.check_run import check
from flame_train.run.memory import kept_prediction
from flame_train.run.memory.kept_prediction import kept_prediction as predict
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.training.session import StopRequest

MakePlan = Callable[..., Plan]


@pytest.fixture
def predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that they are kept in, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flame-train" / "predictions"


@pytest.fixture
def plan(small_config: Callable[..., Config], small_base: Path, tmp_path: Path) -> MakePlan:
    base = tmp_path / "base.safetensors"
    shutil.copy(small_base, base)
    return lambda **changes: make_plan(
        check(small_config(**{"train": {"precision": "bf16"}, "model": {"checkpoint": str(base)}} | changes)),
        StopRequest(),
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were run on shapes."""
    plans = list[Plan]()

    def counted(plan: Plan, *rest: Any) -> Any:
        plans.append(plan)
        return predicted_memory(plan, *rest)

    monkeypatch.setattr(kept_prediction, "predicted_memory", counted)
    return plans


def test_a_second_start_takes_what_the_first_predicted(predictions: Path, plan: MakePlan, made: list[Plan]) -> None:
    first = predict(plan(), H100, 1)
    assert first == predicted_memory(plan(), H100)
    assert len(first.kernels.texts) > 10
    assert len(first.kernels.calls) > 0
    assert predict(plan(), H100, 1) == first
    assert len(made) == 1
    assert len([*predictions.iterdir()]) == 1


def test_what_decides_no_shape_does_not_matter(
    predictions: Path, plan: MakePlan, made: list[Plan], tmp_path: Path
) -> None:
    predict(plan(), H100, 1)
    predict(plan(output={"dir": str(tmp_path / "elsewhere")}, checkpoint={"every": 7}), H100, 1)
    other = plan(optimizer={"lr": 3e-3}, train={"precision": "bf16", "seed": 7})
    assert predict(other, H100, 1) == predicted_memory(other, H100)
    longer = plan(train={"precision": "bf16", "steps": 9})
    kept, fresh = predict(longer, H100, 1), predicted_memory(longer, H100)
    assert kept == replace(fresh, kernels=kept.kernels)
    assert len(set(kept.kernels.texts) ^ set(fresh.kernels.texts)) == 2
    assert len(made) == 1


def test_what_decides_the_memory_makes_it_anew(
    predictions: Path, plan: MakePlan, made: list[Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched() -> Plan:
        os.utime(tmp_path / "base.safetensors", ns=(1, 1))
        return plan()

    def by_other_code() -> Plan:
        monkeypatch.setattr(kept_prediction, "__version__", "99")
        return plan()

    variants: list[tuple[Callable[[], Plan], Gpu, int]] = [
        (plan, H100, 1),
        (lambda: plan(lora={"rank": 7}), H100, 1),
        (lambda: plan(data={"resolution": 128}), H100, 1),
        (lambda: plan(data={"batch_size": 2}), H100, 1),
        (lambda: plan(gradient={"checkpointing": "full"}), H100, 1),
        (plan, RTX_3090, 1),
        (plan, H100, 2),
        (touched, H100, 1),
        (by_other_code, H100, 1),
    ]
    for number, (make, gpu, processes) in enumerate(variants, 1):
        predict(make(), gpu, processes)
        assert len(made) == number


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "folder"])
def test_a_damaged_one_is_made_again(
    predictions: Path, plan: MakePlan, made: list[Plan], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = predict(plan(), H100, 1)
    (file,) = predictions.iterdir()
    match damage:
        case "cut":
            file.write_bytes(file.read_bytes()[:-9])
        case "empty":
            file.write_bytes(b"")
        case "other":
            kept_prediction.write_checked(file, {"encoding": 1})
        case "folder":
            file.unlink()
            file.mkdir()
    assert predict(plan(), H100, 1) == first
    assert len(made) == 2
    assert predict(plan(), H100, 1) == first
    assert len(made) == (3 if damage == "folder" else 2)


def test_the_folder_does_not_grow_without_end(predictions: Path, plan: MakePlan, made: list[Plan]) -> None:
    predictions.mkdir(parents=True)
    for number in range(40):
        (predictions / f"{number:02}.json").write_bytes(b"old")
        os.utime(predictions / f"{number:02}.json", ns=(number, number))
    predict(plan(), H100, 1)
    names = {file.name for file in predictions.iterdir()}
    assert len(names) == 32
    assert {f"{number:02}.json" for number in range(9, 40)} < names
