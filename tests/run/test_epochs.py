"""Runs that count in epochs: their length, their intervals, and what contradicts them."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
from PIL import Image

from flame_train.config.load import load, load_located
from flame_train.errors import ConfigError
from flame_train.io.safetensors import SafetensorsFile
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import StopRequest
from tests.run_files import log_of


@pytest.fixture
def source(small_base, tmp_path):
    """source(lines): a config of five images of one size and two in a batch, so three batches an epoch."""
    folder = tmp_path / "five"
    folder.mkdir()
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("noise")

    def write(**changed):
        sections = {
            "model": {"checkpoint": str(small_base)},
            "data": {"path": str(folder), "resolution": 64, "bucket_step": 32, "batch_size": 2},
            "lora": {"rank": 1, "targets": ["middle_block.1.proj_in"]},
            "train": {"precision": "fp32"},
            "sample": {},
            "checkpoint": {},
            "output": {"dir": str(tmp_path / "run")},
        }
        return {name: sections.get(name, {}) | changed.get(name, {}) for name in {**sections, **changed}}

    return write


def planned(source):
    return make_plan(check(load_located(source)), StopRequest())


@pytest.mark.parametrize(("epochs", "accumulation", "steps"), [(1, 1, 3), (4, 1, 12), (1, 2, 2), (3, 2, 5), (2, 3, 2)])
def test_epochs_are_the_steps_that_the_last_one_needs(source, epochs, accumulation, steps):
    plan = planned(source(train={"epochs": epochs}, gradient={"accumulation": accumulation}))
    assert plan.config.train.steps == steps


def test_steps_beside_epochs_are_taken_only_where_they_are_the_same(source):
    assert planned(source(train={"epochs": 4, "steps": 12})).config.train.steps == 12
    with pytest.raises(
        ConfigError, match=r"train\.epochs: expected this or train\.steps \(13\), got both, and 4 epochs"
    ):
        planned(source(train={"epochs": 4, "steps": 13}))


@pytest.mark.parametrize("section", ["checkpoint", "sample"])
def test_two_intervals_are_refused_and_one_in_epochs_stands_for_the_default(source, section):
    assert getattr(load(source(**{section: {"every_epochs": 2}})), section).every == 0
    message = rf"{section}\.every_epochs: expected this or {section}\.every \(7\), got both"
    with pytest.raises(ConfigError, match=message):
        load(source(**{section: {"every_epochs": 2, "every": 7}}))


def test_keys_that_do_not_fit_the_counted_steps_are_refused(source):
    late = {"warmup_steps": 3}
    assert planned(source(train={"epochs": 2}, schedule=late)).config.train.steps == 6
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps: expected less than train\.steps \(3\), got 3"):
        planned(source(train={"epochs": 1}, schedule=late))


def test_a_run_in_epochs_saves_at_their_ends_and_says_both(source, tmp_path):
    """Two micro-batches a step: three steps are two epochs, whose first ends within the second step."""
    asked = source(
        train={"epochs": 4},
        gradient={"accumulation": 2},
        checkpoint={"every_epochs": 1, "keep": 9},
        sample={"every_epochs": 2, "steps": 1, "prompts": ["noise"]},
    )
    said = train(asked, [], "cpu", dry_run=True)
    assert (said["steps"], said["epochs"], said["batches_per_epoch"]) == (6, 4.0, 3)
    train(asked, [], "cpu", dry_run=False)
    run = tmp_path / "run"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step-{n:06d}" for n in (2, 3, 5, 6)]
    assert sorted(p.name for p in (run / "samples").iterdir()) == [f"step-{n:06d}.png" for n in (0, 3, 6)]
    assert [row["epoch"] for row in log_of(run)][-1] == 4.0
    with SafetensorsFile(run / "lora.safetensors") as file:
        assert [file.metadata[f"ss_{name}"] for name in ("num_epochs", "max_train_steps")] == ["4", "6"]
    kept = tomllib.loads((run / "config.toml").read_text())
    assert (kept["train"]["steps"], kept["train"]["epochs"], kept["checkpoint"]["every"]) == (6, 4, 0)
    again = train(asked, ["output.dir=" + str(tmp_path / "again"), "train.epochs=0", "train.steps=6"], "cpu", False)
    with SafetensorsFile(run / "lora.safetensors") as a, SafetensorsFile(again["lora"]) as b:
        for name in a.names:
            np.testing.assert_array_equal(a.read(name), b.read(name))


def test_a_run_in_epochs_goes_on_when_it_gets_more(source, tmp_path):
    asked = source(train={"epochs": 1}, schedule={"name": "constant"})
    train(asked, [], "cpu", dry_run=False)
    assert train(asked, ["train.epochs=2"], "cpu", dry_run=False)["steps"] == 6
