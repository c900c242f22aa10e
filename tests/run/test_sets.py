"""Runs on several sets of images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flame_train.config.load import load
from flame_train.errors import ConfigError, OutputError
from flame_train.run.commands.stages import train
from tests.run_files import lora_of

SHORT = ["schedule.name=constant", "train.steps=3", "train.precision=fp32", "sample.every=0"]


@pytest.fixture
def two_sets(drawn, tmp_path):
    """The drawings in two folders."""
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted(drawn.iterdir())[:10]:
        shutil.move(path, other / path.name)
    return drawn, other


@pytest.fixture
def run(small_base, tmp_path):
    """Trains the small base on sets; the result is the run folder."""

    def trained(out, *sets, steps=3, **data):
        source = {
            "model": {"checkpoint": str(small_base)},
            "data": {"resolution": 64, "cache": str(tmp_path / "cache"), **data},
            "output": {"dir": str(tmp_path / out)},
        }
        if sets:
            source["data"]["sets"] = list(sets)
        train(source, [*SHORT, f"train.steps={steps}"], "cpu", False)
        return tmp_path / out

    return trained


def test_one_set_is_what_a_path_is(run, drawn):
    assert lora_of(run("a", path=str(drawn))) == lora_of(run("b", {"path": str(drawn)}))


def test_all_sets_are_trained_on_but_those_for_validation(run, two_sets):
    images, other = map(str, two_sets)
    listed = json.loads((run("a", {"path": images}, {"path": other, "repeats": 2}) / "dataset.json").read_text())
    assert {row["set"] for row in listed} == {"images", "other"}
    kept = run("b", {"path": images}, {"path": other, "validation": True})
    assert lora_of(kept) == lora_of(run("c", {"path": images}))


def test_a_run_on_sets_continues_to_the_same_bits_and_refuses_other_sets(run, two_sets):
    first, second = ({"path": str(path), "weight": 0.5} for path in two_sets)
    whole = lora_of(run("a", first, second, steps=6))
    run("b", first, second, steps=3)
    assert lora_of(run("b", first, second, steps=6)) == whole
    with pytest.raises(OutputError, match=r"data\.sets"):
        run("b", first, second | {"weight": 1.0}, steps=6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[[data.sets]]\nrepeats = 2",
            "x.toml:1: data.sets: expected path, the folder of images, in table 1, got none",
        ),
        ('[data]\npath = "a"\n[[data.sets]]\npath = "b"', "data.path: expected this or tables"),
        ('[[data.sets]]\npath = "b"\nrepeat = 2', "in data.sets 1: repeat: unknown key"),
    ],
)
def test_wrong_sets_are_told(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load("x.toml")
    assert said in str(error.value)
