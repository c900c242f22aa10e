"""Chroma from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flame_train.io.safetensors import save_file
from flame_train.models.chroma.names import lora_family
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import family_of
from tests.recipes.bases import arrays_of, check_continuation, first_loss, small_base, trainer

FP8 = ml_dtypes.float8_e4m3fn
Array = np.ndarray[Any, Any]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "chroma")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Callable[..., int]:
    texts = sorted(drawn.glob("*.txt"))
    texts[0].write_text(texts[0].read_text() + ", with so many words behind it that it takes more rows than the others")
    return trainer(base, drawn, tmp_path, "t5_tokens = 77")


def test_a_run_and_its_continuation_give_the_same_bytes(train: Callable[..., int], tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    check_continuation(train, tmp_path / "run", lora_family(), 2 * 8 + 2 * 2)


def test_separate_files_and_scaled_fp8_are_the_checkpoint(
    train: Callable[..., int], arrays: dict[str, Array], tmp_path: Path
) -> None:
    """ComfyUI's three files, of which the transformer has factors for its fp8 weights, give the same first loss."""

    def below(prefix: str) -> dict[str, Array]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    transformer = below("model.diffusion_model.")
    linear = [name for name in transformer if name.endswith(("mlp.0.weight", "linear2.weight"))]
    stored = {name: (8 * transformer[name].astype(np.float32)).astype(FP8) for name in linear}
    factors = {name.replace(".weight", ".scale_weight"): np.array(0.125, np.float32) for name in linear}
    rounded = {name: (array.astype(np.float32) * 0.125).astype(np.float16) for name, array in stored.items()}
    save_file(tmp_path / "c.safetensors", transformer | stored | factors | {"scaled_fp8": np.zeros(0, FP8)})
    save_file(tmp_path / "t5xxl_fp16.safetensors", below("text_encoders.t5xxl.transformer."))
    save_file(tmp_path / "ae.safetensors", below("first_stage_model."))
    save_file(tmp_path / "whole.safetensors", arrays | {f"model.diffusion_model.{n}": a for n, a in rounded.items()})
    write_vocabulary(tmp_path)
    named = [f"model.vae={tmp_path / 'ae.safetensors'}", f"text_encoders.t5={tmp_path / 't5xxl_fp16.safetensors'}"]
    losses = []
    for file, more in (("c.safetensors", named), ("whole.safetensors", [])):
        run = tmp_path / f"run-{file}"
        given = [f"model.checkpoint={tmp_path / file}", f"output.dir={run}", "train.steps=1", "sample.every=0", *more]
        given += [f"data.cache={tmp_path / 'encoded'}"]
        assert train(*(word for setting in given for word in ("--set", setting))) == 0
        losses.append(first_loss(run))
    assert losses[0] == losses[1]


def test_captions_encoded_in_the_step_give_the_same_loss(train: Callable[..., int], tmp_path: Path) -> None:
    """Of a base in fp8 too, whose T5 is as well."""
    losses = []
    for cache in ("auto", "off"):
        given = [f"text_encoders.cache={cache}", f"output.dir={tmp_path / cache}", "train.steps=1", "sample.every=0"]
        given += ["model.quantize=fp8", "text_encoders.precision=fp8"]
        assert train(*(word for setting in given for word in ("--set", setting))) == 0
        losses.append(first_loss(tmp_path / cache))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("text_encoders.t5_padding=zeros", "text_encoders.t5_padding: it has no effect on Chroma"),
        ("loss.guidance_scale=3.5", "loss.guidance_scale: it has no effect on Chroma"),
    ],
)
def test_what_has_no_effect_is_refused(train: Callable[..., int], capsys: Capture, setting: str, told: str) -> None:
    assert train("--set", setting) != 0
    assert told in capsys.readouterr().err


def test_radiance_is_refused(
    train: Callable[..., int], arrays: dict[str, Array], tmp_path: Path, capsys: Capture
) -> None:
    pixels = {f"model.diffusion_model.nerf_blocks.0.{n}": np.zeros(4, np.float16) for n in ("weight", "bias")}
    save_file(tmp_path / "radiance.safetensors", arrays | pixels)
    assert train("--set", f"model.checkpoint={tmp_path / 'radiance.safetensors'}") != 0
    assert "this is: Chroma1 Radiance, which works on pixels" in capsys.readouterr().err


def test_flash_is_no_base_for_training(train: Callable[..., int], base: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copy(base, tmp_path / "Chroma1-Flash.safetensors")
    write_vocabulary(tmp_path)
    assert train("--set", f"model.checkpoint={tmp_path / 'Chroma1-Flash.safetensors'}") != 0
    assert "is called Flash, so it is distilled" in capsys.readouterr().err


def test_the_base_is_recognised(base: Path) -> None:
    assert family_of(base).name == "chroma"
