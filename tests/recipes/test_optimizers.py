"""Every family trains by every optimizer, and a run that stops and goes on ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train.engine.optim.transform import shown_by
from flame_train.optimizers import OPTIMIZERS
from tests.recipes.bases import lose_end, settings
from tests.run_files import log_of, lora_of

IN_CI = ("schedule_free_adamw", "prodigy")  # one that keeps other weights for drawing, and one that finds its rate
OF_ONE_FAMILY = (*IN_CI, "adamw", "adamw8bit", "adafactor", "muon")  # with state of other kinds
CASES = [
    (family, name) if name in named else pytest.param(family, name, marks=pytest.mark.proof)
    for family, named in (("sdxl", OF_ONE_FAMILY), ("sd3", IN_CI), ("flux", IN_CI))
    for name in OPTIMIZERS
    if family == "sdxl" or name not in ("adamw", "sgd")
]
"""That the state of every rule goes on is shown without a run in `tests/run/test_continued.py`."""


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_run_continues_to_the_bit(
    family: str, name: str, train_small: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finds = OPTIMIZERS[name].finds_rate

    run = tmp_path / "run"
    keys = {
        "output.dir": str(run),
        "checkpoint.every": "2",
        "schedule.name": "constant",
        "optimizer.name": name,
        "optimizer.lr": "1.0" if finds else "0.001",
        "optimizer.lora_plus_ratio": "4.0",
        "lora.targets": "['full']",
    }
    assert train_small(family, *settings(keys)) == 0
    whole, log = lora_of(run), log_of(run)
    lose_end(run)
    assert train_small(family, *settings(keys)) == 0
    assert lora_of(run) == whole
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
    assert train_small("sdxl", *settings(keys), "--dry-run") == 0
    assert told in caplog.text
