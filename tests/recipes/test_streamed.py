"""Runs whose blocks wait on the host: the bits of resident ones, what is planned, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flame_train.engine import nn
from flame_train.io.safetensors import SafetensorsFile
from flame_train.run import offloading

Train = Callable[..., int]
FULL = ("--set", "gradient.checkpointing=full")
FAMILIES = ("flux", *(pytest.param(name, marks=pytest.mark.proof) for name in ("sdxl", "sd3", "zimage")))
Capture = pytest.CaptureFixture[str]


def lora_of(run: Path) -> dict[str, bytes]:
    """The bytes of every trained tensor, and of the optimizer's state; the metadata of the file has the config."""
    with SafetensorsFile(run / "lora.safetensors") as file:
        tensors = {name: file.read(name).tobytes() for name in file.names}
    with SafetensorsFile(run / "checkpoints/step-000003/optimizer.safetensors") as file:
        return tensors | {name: file.read(name).tobytes() for name in file.names}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_base_trains_to_the_same_bytes_and_goes_on(train_small: Train, tmp_path: Path, family: str) -> None:
    """With other blocks streamed the run goes on to the same bytes too: nothing of it is decisive."""
    runs = {name: tmp_path / name for name in ("resident", "streamed")}
    each = (*FULL, "--set", "checkpoint.every=1", "--set", "lora.targets=full")
    sampled = ("--set", "sample.prompts=['a red circle']", "--set", "sample.every=3", "--set", "sample.steps=2")
    for name, run in runs.items():
        offload = ("--set", "model.offload=1.0") if name == "streamed" else ()
        assert train_small(family, *each, *sampled, "--set", f"output.dir={run}", *offload) == 0
    assert lora_of(runs["streamed"]) == lora_of(runs["resident"])
    image = "samples/step-000003.png"
    assert (runs["streamed"] / image).read_bytes() == (runs["resident"] / image).read_bytes()
    for step in (2, 3):
        shutil.rmtree(runs["streamed"] / "checkpoints" / f"step-{step:06d}")
    (runs["streamed"] / "lora.safetensors").unlink()
    some = ("--set", "model.offload=0.5", "--set", "sample.every=0")
    assert train_small(family, *each, "--set", f"output.dir={runs['streamed']}", *some) == 0
    assert lora_of(runs["streamed"]) == lora_of(runs["resident"])


def test_the_plan_says_what_waits_and_a_small_host_is_told_before_anything_is_loaded(
    train_small: Train, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (*FULL, "--set", "model.offload=1.0", "--set", f"output.dir={tmp_path / 'run'}")
    assert train_small("flux", *asked, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["streamed blocks"] == "4 of 4"
    assert found["predicted host memory GiB"] >= 0
    monkeypatch.setattr(offloading, "available", lambda: 1 << 10)
    monkeypatch.setattr(nn, "load", lambda *_, **__: pytest.fail("something was loaded"))
    assert train_small("flux", *asked) == 5
    assert "of weights are to wait in host memory, which has 0.00 GiB free" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
