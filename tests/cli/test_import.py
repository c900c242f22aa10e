"""`flame-train import` on a terminal, and a run that is planned from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flame_train import cli
from flame_train.families import FAMILY_TITLES

CONFIG = """\
pretrained_model_name_or_path = {base!r}
train_data_dir = {images!r}
output_dir = {out!r}
network_module = "networks.lora"
network_dim = 4
network_alpha = 2
learning_rate = 1e-3
optimizer_type = "AdamW"
max_train_steps = 4
resolution = 96
bucket_reso_steps = 32
bucket_no_upscale = true
caption_extension = ".txt"
mixed_precision = "no"
quantum_leap = 1
"""


@pytest.fixture
def kohya(tmp_path: Path, small_base: Path, drawn: Path) -> Path:
    path = tmp_path / "kohya.toml"
    path.write_text(CONFIG.format(base=str(small_base), images=str(drawn), out=str(tmp_path / "run")))
    (tmp_path / "elsewhere.toml").write_text(CONFIG.format(base="elsewhere.safetensors", images="x", out="y"))
    return path


def test_an_imported_config_can_be_planned(kohya: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = kohya.with_name("ours.toml")
    assert cli.run(["import", str(kohya), "-o", str(ours), "--family", "sdxl"]) == 0
    told = capsys.readouterr().out
    assert f"{kohya}:15: quantum_leap = 1: not known to this version" in told
    assert f"flame-train train {ours} --dry-run" in told
    assert cli.run(["train", "--config", str(ours), "--device", "cpu", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 4
    assert plan["images"] == 12


def test_without_an_output_the_config_is_printed(kohya: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["import", str(kohya), "--family", "sdxl"]) == 0
    printed = capsys.readouterr().out
    assert "alpha = 2.0" in printed
    kohya.with_name("printed.toml").write_text(printed)
    assert cli.run(["train", "--config", str(kohya.with_name("printed.toml")), "--device", "cpu", "--dry-run"]) == 0


def test_json_has_all_of_it(kohya: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["import", str(kohya), "--family", "sdxl", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["from"] == "sd-scripts"
    assert result["carried"]["lora.alpha"]["value"] == 2.0
    assert result["missing"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.toml"], "no such file"),
        (["elsewhere.toml"], "add --family sdxl or sd15 or sd3 or flux"),
        (["kohya.toml", "--family", "sora"], f"expected a model family ({', '.join(FAMILY_TITLES)}), got sora"),
        (["kohya.toml", "--family", "sdxl", "-o", "ours.yaml"], ".toml"),
    ],
)
def test_a_mistake_is_one_line(kohya: Path, arguments: list[str], message: str, capsys, monkeypatch) -> None:
    monkeypatch.chdir(kohya.parent)
    assert cli.run(["import", *arguments]) in (2, 6)
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
