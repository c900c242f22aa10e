"""Runs whose blocks wait on the host: the bits of resident ones, what is planned, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.engine import nn
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.small import write_small
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.models.registry import FAMILIES as BY_NAME
from flame_train.run.memory import card as offloading

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
        offload = ("--set", f"data.cache={tmp_path / name}-cache")
        offload = (*offload, "--set", "model.offload=1.0") if name == "streamed" else offload
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
    assert (found["streamed_blocks"], found["blocks"]) == (4, 4)
    assert found["predicted_host_memory_gib"] >= 0
    monkeypatch.setattr(offloading, "available", lambda: 1 << 10)
    monkeypatch.setattr(nn, "load", lambda *_, **__: pytest.fail("something was loaded"))
    assert train_small("flux", *asked) == 5
    assert "of weights are to wait in host memory, which has 0.00 GiB free" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("zimage", ()),
        pytest.param("flux2", ("--set", "lora.kind=dora"), marks=pytest.mark.proof),
        pytest.param("sdxl", ("--set", "lora.targets=full"), marks=pytest.mark.proof),
        pytest.param("flux", (*FULL, "--set", "model.offload=0.5"), marks=pytest.mark.proof),
    ],
)
def test_images_of_a_second_model_are_those_of_that_model_with_the_lora(
    train_small: Train, tmp_path: Path, family: str, settings: tuple[str, ...]
) -> None:
    """Drawn during a run on one checkpoint, and by `sample` on the other with the LoRA's file. The run is the same."""
    sampled = ("--set", "sample.prompts=['a red circle']", "--set", "sample.every=3", "--set", "sample.steps=2")
    sampled = (*sampled, "--set", "sample.guidance_scale=1.0", "--set", "optimizer.lr=0.1", *settings)

    def run(name: str, model: str) -> np.ndarray[Any, Any]:
        own = ("--set", f"sample.model={model}", "--set", f"output.dir={tmp_path / name}")
        assert train_small(family, *sampled, *own, "--set", "output.precision=fp32") == 0
        return pixels(tmp_path / name / "samples/step-000003.png")

    plain = run("plain", "")
    base = tmp_path / family / "base.safetensors"
    other = another(base, BY_NAME[family].files.components[0].prefixes[0])
    second = run("second", str(other))
    assert lora_of(tmp_path / "second") == lora_of(tmp_path / "plain")
    for checkpoint, image in ((base, plain), (other, second)):
        out = tmp_path / f"{checkpoint.stem}.png"
        asked = ["sample", "-m", str(checkpoint), "-p", "a red circle", "-o", str(out), "--steps", "2"]
        asked += ["--lora", str(tmp_path / "second/lora.safetensors"), "--guidance-scale", "1", "--width", "64"]
        assert cli.run([*asked, "--height", "64", "--precision", "fp32", "--device", "cpu"]) == 0
        assert np.abs(pixels(out) - image).max() <= 1
    assert np.abs(second - plain).mean() > 1


def another(base: Path, prefix: str) -> Path:
    """A file beside the base's, whose denoiser has other numbers everywhere."""
    noise = np.random.default_rng(5)
    with SafetensorsFile(base) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
    for name, array in tensors.items():
        if name.startswith(prefix):
            tensors[name] = (array + noise.standard_normal(array.shape) * 0.1 * np.abs(array).mean()).astype(
                array.dtype
            )
    save_file(made := base.parent / "other.safetensors", tensors)
    return made


def pixels(path: Path) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(path)).astype(int)


def test_a_second_model_that_does_not_fit_is_refused_before_the_run(
    train_small: Train, tmp_path: Path, capsys: Capture
) -> None:
    asked = ("--set", "sample.prompts=['a red circle']", "--set", f"output.dir={tmp_path / 'run'}", "--dry-run")
    assert train_small("flux", *asked, "--set", f"sample.model={tmp_path / 'none.safetensors'}") != 0
    assert "none.safetensors" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    BY_NAME["zimage"].write_small_base(other, 3)
    wrong = ("--set", f"sample.model={other / 'base.safetensors'}")
    assert train_small("flux", *asked, *wrong) == 2
    expected = "sample.model: expected a checkpoint of Flux.1, as model.checkpoint is, got one of Z-Image"
    assert expected in capsys.readouterr().err
    write_small({"": Flux(FluxArch.tiny(guidance=False, context_dim=64, pooled_dim=32))}, other, 3)
    assert train_small("flux", *asked, *wrong) == 2
    expected = r"sample\.model: expected the tensors of model\.checkpoint in .*, got \d+ others: guidance_in"
    assert re.search(expected, capsys.readouterr().err)
