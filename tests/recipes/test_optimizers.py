"""Every family trains by every optimizer, and a run that stops and goes on ends with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flame_train.engine.optim.transform import shown_by
from flame_train.io.safetensors import SafetensorsFile
from flame_train.optimizers import OPTIMIZERS

IN_CI = ("schedule_free_adamw", "prodigy")  # one that keeps other weights for drawing, and one that finds its rate
CASES = [("sdxl", name) for name in OPTIMIZERS] + [
    (family, name) if name in IN_CI else pytest.param(family, name, marks=pytest.mark.proof)
    for family in ("sd3", "flux")
    for name in OPTIMIZERS
    if name not in ("adamw", "sgd")
]


def lora(folder: Path) -> dict[str, bytes]:
    with SafetensorsFile(folder / "lora.safetensors") as file:
        return {name: np.asarray(file.read(name)).tobytes() for name in file.names}


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_run_continues_to_the_bit(
    family: str, name: str, train_small: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finds = OPTIMIZERS[name].finds_rate

    def run(folder: str, steps: int) -> Path:
        keys = {
            "output.dir": str(tmp_path / folder),
            "train.steps": str(steps),
            "schedule.name": "constant",
            "optimizer.name": name,
            "optimizer.lr": "1.0" if finds else "0.001",
            "optimizer.lora_plus_ratio": "4.0",
            "lora.targets": "['full']",
        }
        assert train_small(family, *(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))) == 0
        return tmp_path / folder

    whole = run("whole", 3)
    run("parts", 2)
    assert lora(run("parts", 3)) == lora(whole)
    log = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert len(log) == 3
    shown = shown_by(OPTIMIZERS[name]().rule())
    assert all(set(shown) <= line.keys() for line in log)
    assert bool(shown) == finds
    assert "optimizer.lr" not in caplog.text


@pytest.mark.parametrize(
    ("name", "rate", "told"),
    [
        ("adamw", "1.0", 'optimizer.lr: 1.0 is usual for "prodigy" and its kin alone; "adamw" wants 1e-5 to 1e-3'),
        ("prodigy", "0.0001", 'optimizer.lr: "prodigy" finds its rate, of which 0.0001 is a factor; 1 is usual'),
    ],
)
def test_a_rate_of_another_kind_of_optimizer_is_noticed(
    name: str, rate: str, told: str, train_small: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"output.dir": str(tmp_path / "run"), "optimizer.name": name, "optimizer.lr": rate}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    assert train_small("sdxl", *settings, "--dry-run") == 0
    assert told in caplog.text
