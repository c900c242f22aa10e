"""A run on a base in fewer bits goes on only if the same layers are rounded, in the same way."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flame_train.models.sdxl.unet import UNet
from tests.recipes.bases import Train, lose_end, options, trainer

SETTINGS = options('model.quantize="int8-convrot"', 'lora.targets=["attention"]', "train.steps=2", "checkpoint.every=1")


@pytest.fixture
def train(small_base: Path, drawn: Path, tmp_path: Path) -> Train:
    begun = trainer(small_base, drawn, tmp_path)
    return lambda *more: begun(*SETTINGS, "--set", "sample.every=0", "--set", f"data.cache={tmp_path}/cache", *more)


def forget_rounding(checkpoint: Path) -> None:
    """Leaves of a checkpoint what an earlier version wrote."""
    state = json.loads((checkpoint / "state.json").read_text())
    assert state.pop("rounded")
    text = json.dumps(state)
    (checkpoint / "state.json").write_text(text)
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


def test_a_run_whose_base_is_rounded_otherwise_is_not_continued(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train() == 0
    lose_end(tmp_path / "run")
    capsys.readouterr()
    monkeypatch.setattr(UNet, "rounded", replace(UNet.rounded, unless_rotated=("*.proj_in",)))
    assert train() == 6
    told = capsys.readouterr().err
    assert "step-000001: was trained on a base whose layers model.quantize rounded otherwise" in told
    assert "output.dir" in told
    monkeypatch.undo()
    assert train() == 0


def test_a_run_whose_rounding_is_not_known_says_so_and_goes_on(
    train: Train, small_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train() == 0
    last = tmp_path / "run" / "checkpoints" / "step-000002" / "lora.safetensors"
    whole = last.read_bytes()
    lose_end(tmp_path / "run")
    forget_rounding(tmp_path / "run" / "checkpoints" / "step-000001")
    caplog.clear()
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(small_base, tmp_path / "moved")
    assert train("--set", f"model.checkpoint={moved}") == 0
    said = 'step-000001 does not say which layers model.quantize = "int8-convrot" rounded'
    assert caplog.text.count(said) == 1
    assert last.read_bytes() == whole
