"""Cards by compute capability: the commands refuse what a card cannot do before they read anything, and name it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train import cli
from flame_train.engine.backend import check_formats, cuda
from flame_train.engine.backend.capability import refuse_formats, refuse_too_old
from flame_train.engine.backend.shapes.driver import H100, RTX_3090, T4
from flame_train.engine.dispatch import explain
from flame_train.engine.op import REGISTRY
from flame_train.errors import EnvironmentFault

ASKED = {"train.precision": "bf16", "text_encoders.precision": "auto", "model.vae_precision": "bf16"}


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0)])
def test_older_than_turing_is_refused(capability: tuple[int, int]) -> None:
    dotted = ".".join(map(str, capability))
    with pytest.raises(EnvironmentFault, match=rf"cuda:0 \(P40\) has .* {dotted}; expected 7.5 or newer"):
        refuse_too_old("cuda:0 (P40)", capability)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (12, 0)])
def test_turing_and_newer_are_taken(capability: tuple[int, int]) -> None:
    refuse_too_old("cuda:0", capability)


def test_bf16_is_refused_on_turing_with_every_key_that_asks() -> None:
    match = r'train.precision, model.vae_precision: expected "fp16" or "fp32" on cuda:0 \(T4\).* 7.5, got "bf16"'
    with pytest.raises(EnvironmentFault, match=match):
        refuse_formats("cuda:0 (T4)", (7, 5), ASKED)
    refuse_formats("cuda:0 (T4)", (7, 5), {"train.precision": "fp16", "text_encoders.precision": "auto"})
    refuse_formats("cuda:0 (A100)", (8, 0), ASKED)


@pytest.mark.parametrize(("card", "taken"), [(H100, True), (RTX_3090, True), (T4, False)], ids=["H100", "3090", "T4"])
def test_the_backend_knows_its_card(gpu: Any, taken: bool) -> None:
    check_formats("cuda", {"train.precision": "fp16"})
    check_formats("cpu", ASKED)
    if taken:
        check_formats("cuda", ASKED)
        return
    with pytest.raises(EnvironmentFault, match="stand-in"):
        check_formats("cuda", ASKED)


NOWHERE = {
    "train": ["--set", "model.checkpoint=nowhere.safetensors", "--set", "data.path=nowhere", "--set", "output.dir=run"],
    "cache": ["--set", "model.checkpoint=nowhere.safetensors", "--set", "data.path=nowhere", "--set", "output.dir=run"],
    "sample": ["-m", "nowhere.safetensors", "-p", "a", "-o", "x.png"],
    "bench": ["step"],
}


@pytest.mark.parametrize("card", [T4], ids=["T4"])
@pytest.mark.parametrize("command", NOWHERE)
def test_commands_refuse_bf16_before_they_read_anything(
    gpu: Any, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").write_text("")
    given = [*NOWHERE[command], *(["--config", "empty.toml"] if command in ("train", "cache") else [])]
    asked = ["--precision", "bf16"] if command in ("sample", "bench") else []
    assert cli.run([command, *given, *asked, "--device", "cuda"]) == 4
    told = capsys.readouterr().err
    assert "stand-in" in told
    assert 'expected "fp16" or "fp32"' in told
    assert "nowhere" not in told


class Runtime:
    """A driver with a card of compute capability 6.1."""

    def getDeviceCount(self) -> int:  # noqa: N802  # CUDA's names
        return 1

    def getDeviceProperties(self, index: int) -> dict[str, Any]:  # noqa: N802
        return {"name": b"Tesla P40", "major": 6, "minor": 1}


@pytest.mark.parametrize("command", NOWHERE)
def test_commands_refuse_an_old_card_before_they_read_anything(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = type("cupy", (), {"cuda": type("cuda", (), {"runtime": Runtime()})})
    monkeypatch.setitem(sys.modules, "cupy", namespace)
    monkeypatch.setattr(cuda, "_STATE", {})
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").write_text("")
    given = [*NOWHERE[command], *(["--config", "empty.toml"] if command in ("train", "cache") else [])]
    assert cli.run([command, *given, "--device", "cuda"]) == 4
    told = capsys.readouterr().err
    assert "Tesla P40" in told
    assert "6.1" in told
    assert "nowhere" not in told


@pytest.mark.parametrize("card", [T4], ids=["T4"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_attention_on_turing_is_by_our_own_kernels(gpu: Any, dtype: Any) -> None:
    query = flame.tensor(np.ones((1, 2, 64, 64), dtype), device="cuda")
    found = explain(REGISTRY["scaled_dot_product_attention"], query, query, query)
    (chosen,) = [impl for impl, why in found if why == "chosen"]
    assert "cudnn" not in chosen.lower()
    assert chosen != "reference"
