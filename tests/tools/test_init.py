"""init: a file that loads, never over another."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from flame_train import cli
from flame_train.config.load import load


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What init asks of the families is little, and families load the engine."""
    recipe = types.SimpleNamespace(title="SDXL", command="sdxl-lora", unsupported_keys=lambda: ())
    fake = types.SimpleNamespace(FAMILIES={"sdxl": recipe, "other": recipe})
    monkeypatch.setitem(sys.modules, "flame_train.models.registry", fake)
    monkeypatch.chdir(tmp_path)


def test_the_file_needs_only_its_required_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "sdxl", "-o", "my.toml"]) == 0
    assert capsys.readouterr().out == "my.toml\n"
    config = load("my.toml", ("model.checkpoint=a", "data.path=b", "output.dir=c"))
    assert config.lora.rank == 16
    assert cli.run(["init", "sdxl"]) == 0
    assert capsys.readouterr().out == Path("my.toml").read_text()


def test_an_existing_file_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text("mine")
    assert cli.run(["init", "sdxl", "-o", "my.toml"]) == 6
    assert "exists already" in capsys.readouterr().err
    assert Path("my.toml").read_text() == "mine"


@pytest.mark.parametrize(("family", "hint"), [("sdlx", "; did you mean sdxl?"), ("sdxl-lora", "sdxl?"), ("zzz", "")])
def test_an_unknown_family_is_told_the_known(capsys: pytest.CaptureFixture[str], family: str, hint: str) -> None:
    assert cli.run(["init", family, "-o", "my.toml"]) == 2
    message = capsys.readouterr().err
    assert f"expected a model family (sdxl, other), got {family}" in message
    assert message.endswith(hint + "\n")
    assert not Path("my.toml").exists()


def test_an_existing_file_is_overwritten_by_force() -> None:
    Path("my.toml").write_text("mine")
    assert cli.run(["init", "sdxl", "-o", "my.toml", "--force"]) == 0
    assert load("my.toml", ("model.checkpoint=a", "data.path=b", "output.dir=c")).lora.rank == 16


def test_another_ending_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "sdxl", "-o", "my.yaml"]) == 2
    assert "my.yaml: expected a name ending in .toml, got .yaml" in capsys.readouterr().err
    assert not Path("my.yaml").exists()


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["init", "sdxl", "-o", "my.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"family": "sdxl", "output": "my.toml"}
    assert cli.run(["init", "sdxl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"family": "sdxl", "config": Path("my.toml").read_text()}
