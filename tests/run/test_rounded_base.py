"""A run on a base in fewer bits goes on only if the same layers are rounded, in the same way."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flame_train.models.sdxl.unet import UNet
from tests.recipes.bases import Train, forget, lose_end, options, trainer

SETTINGS = options('model.quantize="int8-convrot"', 'lora.targets=["attention"]', "train.steps=2", "checkpoint.every=1")


@pytest.fixture
def train(small_base: Path, drawn: Path, tmp_path: Path) -> Train:
    begun = trainer(small_base, drawn, tmp_path)
    return lambda *more: begun(*SETTINGS, "--set", "sample.every=0", "--set", f"data.cache={tmp_path}/cache", *more)


def test_a_run_whose_base_is_rounded_otherwise_is_not_continued(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train() == 0
    lose_end(tmp_path / "run")
    capsys.readouterr()
    monkeypatch.setattr(UNet, "rounded", replace(UNet.rounded, unless_rotated=("*.proj_in",)))
    for more in ((), ("--dry-run",)):
        assert train(*more) == 6
        told = capsys.readouterr().err
        assert "step-000001: was trained on a base whose layers model.quantize rounded otherwise" in told
        assert "output.dir" in told
    monkeypatch.undo()
    assert train() == 0


def test_a_run_whose_rounding_is_not_known_says_so_and_goes_on(
    train: Train,
    small_base: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train() == 0
    last = tmp_path / "run" / "checkpoints" / "step-000002" / "lora.safetensors"
    whole = last.read_bytes()
    lose_end(tmp_path / "run")
    forget(tmp_path / "run" / "checkpoints" / "step-000001", "rounded")
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(small_base, tmp_path / "moved")
    for more in (("--dry-run",), ()):
        caplog.clear()
        assert train("--set", f"model.checkpoint={moved}", *more) == 0
        assert caplog.text.count("step-000001 does not say which layers model.quantize rounded") == 1
    assert "  after step 1\n" in capsys.readouterr().out
    assert last.read_bytes() == whole
