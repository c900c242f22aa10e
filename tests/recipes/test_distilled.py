"""Runs on a distilled base: what is drawn, and what is only added while a LoRA is trained."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.registry import FAMILIES
from tests.recipes.bases import (
    Train,
    forget,
    lose_end,
)
from tests.run_files import lora_of

SAMPLED = (
    *("sample.prompts=['a red circle', 'a red circle --am 0']", "sample.every=3", "sample.steps=2"),
    *("sample.guidance_scale=1.0", "optimizer.lr=0.1", "validation.every=3", "validation.fraction=0.2"),
)


def write_adapter(file: Path, rank: int = 4) -> Path:
    """An adapter of the small Z-Image, as ostris names his."""
    rng = np.random.default_rng(0)
    names = [f"diffusion_model.layers.{i}.attention.{part}" for i in range(2) for part in ("to_q", "to_out.0")]
    pair = {"lora_A.weight": (rank, 64), "lora_B.weight": (64, rank)}
    save_file(
        file,
        {
            f"{name}.{end}": (0.3 * rng.standard_normal(shape)).astype(np.float32)
            for name in names
            for end, shape in pair.items()
        },
    )
    return file


def settings(*given: str) -> list[str]:
    return [word for setting in given for word in ("--set", setting)]


def pixels(path: Path) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(path)).astype(int)


def images(path: Path) -> list[np.ndarray[Any, Any]]:
    """Both images of a grid, without the line between them."""
    grid = pixels(path)
    return [grid[:64, :64], grid[:64, 68:132]]


def validation_of(run: Path) -> float:
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return next(line["validation"]["loss"] for line in lines if "validation" in line)


@pytest.mark.parametrize(
    "stored",
    [
        (),
        pytest.param(("model.quantize=fp8",), id="fp8"),
        pytest.param(("model.quantize=nf4",), id="nf4", marks=pytest.mark.proof),
    ],
)
def test_samples_are_of_the_base_without_the_training_adapter(
    train_small: Train, tmp_path: Path, stored: tuple[str, ...]
) -> None:
    """Without the LoRA an image is that of a run without the adapter, byte for byte, before training and after it.

    With the LoRA it is what `sample` draws of the base. The validation loss is that of the model that is trained.
    """
    file = write_adapter(tmp_path / "adapter.safetensors")
    for name, more in (("with", [f"model.training_adapter={file}"]), ("without", [])):
        asked = (*SAMPLED, *stored, *more, f"output.dir={tmp_path / name}", "output.precision=fp32")
        assert train_small("zimage", *settings(*asked)) == 0
    grids = {
        (name, step): images(tmp_path / name / f"samples/step-{step:06d}.png")
        for name in ("with", "without")
        for step in (0, 3)
    }
    plain = grids["without", 0][1]
    for grid in grids.values():
        np.testing.assert_array_equal(grid[1], plain)
    np.testing.assert_array_equal(grids["with", 0][0], grids["without", 0][0])
    assert validation_of(tmp_path / "with") != validation_of(tmp_path / "without")
    if not stored:
        out = tmp_path / "drawn.png"
        asked = ("sample", "-m", str(tmp_path / "zimage/base.safetensors"), "-p", "a red circle", "-o", str(out))
        how = ("--steps", "2", "--guidance-scale", "1", "--width", "64", "--height", "64", "--precision", "fp32")
        lora = str(tmp_path / "with/lora.safetensors")
        assert cli.run([*asked, *how, "--lora", lora, "--device", "cpu"]) == 0
        assert np.abs(pixels(out) - grids["with", 3][0]).max() <= 1
        assert np.abs(grids["with", 3][0] - plain).mean() > 1


def test_a_base_is_drawn_before_training_as_it_is_and_by_the_other_model(train_small: Train, tmp_path: Path) -> None:
    """`sample.model` draws all grids, and the base one more at step 0, with its own steps; `sample.first` none."""
    assert train_small("zimage", *settings(*SAMPLED, f"output.dir={tmp_path / 'plain'}")) == 0
    turbo = tmp_path / "zimage/turbo.safetensors"
    turbo.write_bytes((tmp_path / "zimage/base.safetensors").read_bytes())
    other = (*SAMPLED, f"sample.model={turbo}")
    assert train_small("zimage", *settings(*other, f"output.dir={tmp_path / 'both'}")) == 0
    names = sorted(path.name for path in (tmp_path / "both/samples").iterdir())
    assert names == ["step-000000-base.png", "step-000000.png", "step-000003.png"]
    drawn, plain = tmp_path / "both/samples/step-000000-base.png", tmp_path / "plain/samples/step-000000.png"
    assert drawn.read_bytes() == plain.read_bytes()
    assert (tmp_path / "both/samples/step-000000.png").read_bytes() != plain.read_bytes()
    assert train_small("zimage", *settings(*other, "sample.first=false", f"output.dir={tmp_path / 'no'}")) == 0
    assert [path.name for path in (tmp_path / "no/samples").iterdir()] == ["step-000003.png"]


SINCE = r"(first|spacing|contrastive_\w+|min_rank|rank_exponent|training_adapter_strength|train_distilled) = .*\n"
"""The lines of a run's config that a version before these keys did not write."""


def test_a_run_of_an_older_version_goes_on_without_a_grid_of_step_0(train_small: Train, tmp_path: Path) -> None:
    asked = (*SAMPLED[:4], "checkpoint.every=2", "schedule.name=constant", "sample.every=2")
    assert train_small("zimage", *settings(*asked, "train.steps=4", f"output.dir={tmp_path / 'whole'}")) == 0
    old = (*asked, f"output.dir={tmp_path / 'old'}")
    assert train_small("zimage", *settings(*old, "train.steps=2", "sample.first=false")) == 0
    config = tmp_path / "old/config.toml"
    before = config.read_text()
    config.write_text(re.sub(rf"(?m)^{SINCE}", "", before))
    assert len(config.read_text().splitlines()) == len(before.splitlines()) - 8
    assert train_small("zimage", *settings(*old, "train.steps=4")) == 0
    assert [path.name for path in sorted((tmp_path / "old/samples").iterdir())] == [
        "step-000002.png",
        "step-000004.png",
    ]
    assert lora_of(tmp_path / "old") == lora_of(tmp_path / "whole")


def first_loss(run: Path) -> float:
    loss = json.loads((run / "log.jsonl").read_text().splitlines()[0])["loss"]
    assert isinstance(loss, float)
    return loss


def test_a_run_with_all_of_it_goes_on_to_the_same_bytes(train_small: Train, tmp_path: Path) -> None:
    """Adapter, contrastive guidance with a range, masked ranks, and validation of it, on an fp8 base, recomputed."""
    file = write_adapter(tmp_path / "adapter.safetensors")
    asked = [f"model.training_adapter={file}", "model.training_adapter_strength=0.9", "lora.min_rank=1"]
    asked += ["lora.rank_exponent=2.0", "loss.contrastive_scale=[2.0, 4.0]", "loss.contrastive_schedule=sigma"]
    asked += ["lora.dropout=0.1", "data.caption_dropout=0.3", "checkpoint.every=2", "train.steps=4", *SAMPLED[3:]]
    asked += ["validation.every=2", "preservation.kind=blank"]
    asked += ["data.batch_size=1", "gradient.accumulation=2", "gradient.checkpointing=full", "model.quantize=fp8"]
    for name in ("whole", "killed"):
        assert train_small("zimage", *settings(*asked, f"output.dir={tmp_path / name}")) == 0
    killed = tmp_path / "killed"
    shutil.rmtree(killed / "checkpoints/step-000004")
    (killed / "lora.safetensors").unlink()
    assert train_small("zimage", *settings(*asked, f"output.dir={killed}")) == 0
    assert lora_of(killed) == lora_of(tmp_path / "whole")
    assert validation_of(killed) == validation_of(tmp_path / "whole")


def test_a_run_is_not_continued_with_another_adapter(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by another path, nor if only an alpha in the file's metadata changed; the same file elsewhere serves."""
    file, moved = write_adapter(tmp_path / "adapter.safetensors"), tmp_path / "moved.safetensors"
    with SafetensorsFile(file) as read:
        tensors = {name: np.array(read.read(name)) for name in read.names}
    save_file(tmp_path / "louder.safetensors", tensors, {"lora_alpha": "8"})
    save_file(tmp_path / "other.safetensors", {name: 0.5 * array for name, array in tensors.items()})
    asked = ("train.steps=4", "checkpoint.every=2", f"output.dir={tmp_path / 'run'}")
    assert train_small("zimage", *settings(f"model.training_adapter={file}", *asked)) == 0
    lose_end(tmp_path / "run")
    file.rename(moved)
    for other in ("louder", "other"):
        adapter = f"model.training_adapter={tmp_path / other}.safetensors"
        for more in ((), ("--dry-run",)):
            assert train_small("zimage", *settings(adapter, *asked), *more) == 6
            assert "was trained with another training adapter" in capsys.readouterr().err
    adapter = f"model.training_adapter={moved}"
    assert train_small("zimage", *settings(adapter, *asked)) == 0
    lose_end(tmp_path / "run")
    forget(tmp_path / "run/checkpoints/step-000002", "adapter")
    for more in (("--dry-run",), ()):
        caplog.clear()
        assert train_small("zimage", *settings(adapter, *asked), *more) == 0
        assert caplog.text.count("does not say what was in model.training_adapter") == 1


OTHERS = (pytest.param(name, marks=pytest.mark.proof) for name in FAMILIES if name not in ("sdxl", "flux"))


@pytest.mark.parametrize("family", ["sdxl", "flux", *OTHERS])
def test_contrastive_guidance_trains_every_family(train_small: Train, tmp_path: Path, family: str) -> None:
    """The scale changes the loss; one next to 1 leaves it as it is."""
    losses = []
    for scale in ("off", "1.000001", "4.0"):
        more = () if scale == "off" else (f"loss.contrastive_scale={scale}",)
        own = "data.bucket_step=64", "train.steps=1", f"output.dir={tmp_path / scale}"
        assert train_small(family, *settings(*more, *own)) == 0
        losses.append(first_loss(tmp_path / scale))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] != losses[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["lora.min_rank=1", "lora.kind=lokr"], 'lora.min_rank: expected 0 with lora.kind = "lokr"'),
        (["lora.min_rank=3"], "lora.min_rank: expected at most lora.rank (2), got 3"),
        (["lora.rank_exponent=2.0"], "lora.rank_exponent: expected lora.min_rank with it"),
        (
            ["loss.contrastive_scale=[4.0, 3.0]"],
            "loss.contrastive_scale: expected the lower scale first, got [4.0, 3.0]",
        ),
        (
            ["loss.contrastive_scale=0.5"],
            'loss.contrastive_scale: expected "off" or a number > 1 and <= 100 or a list of 2',
        ),
        (["loss.contrastive_schedule=sigma"], "loss.contrastive_schedule: expected loss.contrastive_scale with it"),
    ],
)
def test_what_does_not_fit_is_refused(
    train_small: Train, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    assert train_small("zimage", *settings(*given)) != 0
    assert words in capsys.readouterr().err
