"""Z-Image from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.config.load import load_located
from flame_train.engine.shape_run import H100
from flame_train.io.safetensors import save_file
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import family_of
from flame_train.models.zimage.names import lora_family
from flame_train.run.check.check_run import check
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import StopRequest
from tests.recipes.bases import (
    Array,
    Train,
    below,
    check_continuation,
    check_separate_files,
    first_loss,
    short,
    small_base,
    trainer,
    with_a_longer_caption,
)
from tests.run_files import arrays_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "zimage")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, with_a_longer_caption(drawn), tmp_path)


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    check_continuation(train, tmp_path / "run", lora_family(), 23)


def test_memory_is_predicted_for_the_longest_text_of_the_run(train: Train, drawn: Path, tmp_path: Path) -> None:
    """Of captions and prompts; one that is cut takes as many tokens as a text can have."""
    config, words = tmp_path / "config.toml", " and one word more" * 12

    def taken() -> tuple[int, int, int]:
        plan = make_plan(check(load_located(str(config), ["train.precision=bf16"])), StopRequest())
        own, most = (predicted_memory(each, H100).peak for each in (plan, replace(plan, text_rows={})))
        return plan.text_rows["qwen3"], own, most

    before, small, whole = taken()
    config.write_text(config.read_text().replace("a red circle", f"a red circle{words}"))
    prompted, larger, _ = taken()
    caption = min(drawn.glob("*.txt"))
    caption.write_text(caption.read_text() + words * 20)
    cut, most, largest = taken()
    assert before < prompted < cut == 512
    assert small < larger < most == largest == whole


def test_separate_files_and_scaled_fp8_are_the_checkpoint(
    train: Train, arrays: dict[str, Array], base: Path, tmp_path: Path
) -> None:
    save_file(tmp_path / "ae.safetensors", below("first_stage_model.", arrays))
    text, scaled = "text_encoders.qwen3_4b.transformer.", (".feed_forward.", ".attention.out.")
    check_separate_files(train, base, tmp_path, text, scaled, vae=tmp_path / "ae.safetensors")


def test_what_the_transformer_alone_lacks_is_told(
    arrays: dict[str, Array], tmp_path: Path, train: Train, capsys: Capture
) -> None:
    save_file(tmp_path / "z.safetensors", below("model.diffusion_model.", arrays))
    assert train("--set", f"model.checkpoint={tmp_path / 'z.safetensors'}") != 0
    told = capsys.readouterr().err
    assert "model.vae" in told
    assert "text_encoders.qwen3" in told


def test_guidance_in_training_is_refused(train: Train, capsys: Capture) -> None:
    assert train("--set", "loss.guidance_scale=3.5") != 0
    assert "loss.guidance_scale: it has no effect on Z-Image" in capsys.readouterr().err


def test_a_base_in_8_bits_trains(train: Train, tmp_path: Path) -> None:
    assert short(train, tmp_path / "q", "model.quantize=fp8", "text_encoders.precision=fp8")


def test_captions_encoded_in_the_step_give_the_same_loss(train: Train, tmp_path: Path) -> None:
    losses = [short(train, tmp_path / cache, f"text_encoders.cache={cache}") for cache in ("auto", "off")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_lora_on_the_text_encoder_is_refused(train: Train, capsys: Capture) -> None:
    assert train("--set", 'text_encoders.train=["qwen3"]') != 0
    assert 'no LoRA file of Z-Image speaks of "qwen3"' in capsys.readouterr().err


def test_turbo_is_a_base_with_a_training_adapter_alone(
    train: Train, base: Path, arrays: dict[str, Array], tmp_path: Path, capsys: Capture
) -> None:
    """The adapter is added as it is loaded: the same loss as on a base with it merged in, and another than without."""
    turbo, exact = tmp_path / "z_image_turbo_bf16.safetensors", tmp_path / "z_image_turbo_fp32.safetensors"
    shutil.copy(base, turbo)
    save_file(exact, {name: array.astype(np.float32) for name, array in arrays.items()})
    write_vocabulary(tmp_path, qwen=True)
    quiet = ["--set", "train.steps=1", "--set", "sample.every=0"]
    assert train(*quiet, "--set", f"model.checkpoint={turbo}") != 0
    assert "distilled to few steps" in capsys.readouterr().err
    rng = np.random.default_rng(0)
    pair = {"lora_A.weight": (4, 64), "lora_B.weight": (64, 4)}
    names = [f"diffusion_model.layers.{i}.attention.{part}" for i in range(2) for part in ("to_q", "to_out.0")]
    values = {f"{name}.{end}": 0.3 * rng.standard_normal(shape) for name in names for end, shape in pair.items()}
    file, merged = tmp_path / "adapter.safetensors", tmp_path / "merged.safetensors"
    save_file(file, {name: array.astype(np.float32) for name, array in values.items()})
    assert cli.run(["merge", str(exact), str(file), str(merged)]) == 0
    losses = []
    adapter = ["--set", f"model.training_adapter={file}"]
    for name, checkpoint, more in (("a", exact, adapter), ("b", merged, []), ("c", base, [])):
        given = ["--set", f"model.checkpoint={checkpoint}", "--set", f"output.dir={tmp_path / name}"]
        assert train(*quiet, *given, *more) == 0
        losses.append(first_loss(tmp_path / name))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("name", ["z_image_de_turbo_v1_bf16", "Z-Image-De-Turbo", "z_image_deturbo"])
def test_a_turbo_whose_distillation_was_undone_is_a_base(
    train: Train, base: Path, tmp_path: Path, capsys: Capture, name: str
) -> None:
    """It is trained, and drawn with a base's steps and guidance."""
    shutil.copy(base, tmp_path / f"{name}.safetensors")
    write_vocabulary(tmp_path, qwen=True)
    asked = ("--set", f"model.checkpoint={tmp_path / name}.safetensors", "--set", "sample.steps=0", "--dry-run")
    assert train(*asked) == 0
    assert not family_of(tmp_path / f"{name}.safetensors").distilled(tmp_path / f"{name}.safetensors")


def test_the_base_is_recognised(base: Path) -> None:
    assert family_of(base).name == "zimage"
