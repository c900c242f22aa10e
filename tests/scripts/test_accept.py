"""The acceptance of a checkpoint: what it reports of a good one, and of one with a tensor too few."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.registry import FAMILIES

from .accepting import accept


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    FAMILIES["zimage"].write_small_base(tmp_path / "model", 3)
    return tmp_path / "model" / "base.safetensors"


def test_a_single_file_is_accepted(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = accept(monkeypatch, base, tmp_path / "out", "--set", "data.bucket_step=32")
    assert code == 0
    parts = {name: part["result"] for name, part in report["parts"].items()}
    assert parts.pop("the image beside diffusers'") == parts.pop("the LoRA's image beside diffusers'") == "not tried"
    assert set(parts.values()) == {"passed"}
    assert report["parts"]["names and shapes"]["components"]["transformer"]["shapes of"] == ["zimage-tiny"]
    assert report["parts"]["training"]["steps"] == 2
    assert report["parts"]["the LoRA read back"]["layers"] == 4
    assert report["parts"]["the LoRA read back"]["image changed, of 255"] > 0
    assert str(tmp_path) not in (tmp_path / "out" / "report.txt").read_text()


def test_a_missing_tensor_is_named_and_the_report_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SafetensorsFile(base) as file:
        kept = {n: file.read(n) for n in file.names if n != "model.diffusion_model.layers.1.attention.out.weight"}
        save_file(tmp_path / "model" / "less.safetensors", kept)
    code, report = accept(monkeypatch, tmp_path / "model" / "less.safetensors", tmp_path / "out")
    assert code == 1
    assert report["result"].startswith("failed: names and shapes")
    assert "layers.1.attention.out.weight" in report["parts"]["names and shapes"]["reason"]
    assert report["parts"]["the LoRA read back"]["result"] == "not tried"
