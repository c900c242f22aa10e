"""Chroma from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from flame_train.io.safetensors import save_file
from flame_train.models.chroma.names import lora_family
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import family_of
from tests.recipes.bases import (
    Array,
    Train,
    below,
    check_continuation,
    check_separate_files,
    short,
    small_base,
    trainer,
    with_a_longer_caption,
)
from tests.run_files import arrays_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "chroma")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, with_a_longer_caption(drawn), tmp_path, "t5_tokens = 77")


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    check_continuation(train, tmp_path / "run", lora_family(), 2 * 8 + 2 * 2)


def test_separate_files_and_scaled_fp8_are_the_checkpoint(
    train: Train, arrays: dict[str, Array], base: Path, tmp_path: Path
) -> None:
    save_file(tmp_path / "ae.safetensors", below("first_stage_model.", arrays))
    text, scaled = "text_encoders.t5xxl.transformer.", ("mlp.0.weight", "linear2.weight")
    check_separate_files(train, base, tmp_path, text, scaled, key="t5", vae=tmp_path / "ae.safetensors")


def test_captions_encoded_in_the_step_give_the_same_loss(train: Train, tmp_path: Path) -> None:
    """Of a base in fp8 too, whose T5 is as well."""
    quantized = "model.quantize=fp8", "text_encoders.precision=fp8"
    losses = [short(train, tmp_path / c, f"text_encoders.cache={c}", *quantized)[0] for c in ("auto", "off")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("text_encoders.t5_padding=zeros", "text_encoders.t5_padding: it has no effect on Chroma"),
        ("loss.guidance_scale=3.5", "loss.guidance_scale: it has no effect on Chroma"),
    ],
)
def test_what_has_no_effect_is_refused(train: Train, capsys: Capture, setting: str, told: str) -> None:
    assert train("--set", setting) != 0
    assert told in capsys.readouterr().err


def test_radiance_is_refused(train: Train, arrays: dict[str, Array], tmp_path: Path, capsys: Capture) -> None:
    pixels = {f"model.diffusion_model.nerf_blocks.0.{n}": np.zeros(4, np.float16) for n in ("weight", "bias")}
    save_file(tmp_path / "radiance.safetensors", arrays | pixels)
    assert train("--set", f"model.checkpoint={tmp_path / 'radiance.safetensors'}") != 0
    assert "this is: Chroma1 Radiance, which works on pixels" in capsys.readouterr().err


def test_flash_is_no_base_for_training(train: Train, base: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copy(base, tmp_path / "Chroma1-Flash.safetensors")
    write_vocabulary(tmp_path)
    assert train("--set", f"model.checkpoint={tmp_path / 'Chroma1-Flash.safetensors'}") != 0
    assert "is called Flash, so it is distilled" in capsys.readouterr().err


def test_the_base_is_recognised(base: Path) -> None:
    assert family_of(base).name == "chroma"
