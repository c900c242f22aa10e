"""Qwen-Image 2.1 from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.small import write_vocabulary
from flame_train.models.qwenimage.names import lora_family
from flame_train.text_encoders.qwen3.encoder import COMPREHENDING
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
TEXT = "text_encoders.qwen3vl_8b.transformer."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "qwenimage")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, with_a_longer_caption(drawn), tmp_path, "qwen3_tokens = 128")


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, drawn: Path, tmp_path: Path) -> None:
    """Both formats of its file are the same LoRA, and the cache keeps a caption's own tokens alone."""
    cached = ("--set", f"data.cache={tmp_path / 'cache'}")
    layers = 8 + 2 * 6  # what stands once, and six layers a block
    check_continuation(lambda: train(*cached), tmp_path / "run", lora_family(), layers)

    captions = {}
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        with SafetensorsFile(path) as file:
            if "qwen3" in file.names:
                captions[path] = len(file.read("qwen3"))
    around = len("user\n") + len("\nassistant\n") + 3  # three special tokens
    lengths = sorted(min(128, len(path.read_text().strip().encode()) + around) for path in drawn.glob("*.txt"))
    assert set(captions.values()) >= set(lengths)
    assert COMPREHENDING.opening not in COMPREHENDING.before


def test_separate_files_and_scaled_fp8_are_the_checkpoint(train: Train, base: Path, tmp_path: Path) -> None:
    check_separate_files(train, base, tmp_path, TEXT, (".img_mlp.", ".attn.to_out."))


def test_captions_in_the_step_and_streamed_blocks_give_the_caches_losses(train: Train, tmp_path: Path) -> None:
    kept = short(train, tmp_path / "kept", "text_encoders.cache=on")
    np.testing.assert_allclose(short(train, tmp_path / "not", "text_encoders.cache=off"), kept, rtol=1e-5)
    assert short(train, tmp_path / "streamed", "model.offload=1.0", "gradient.checkpointing=full") == kept


def test_what_does_not_fit_is_refused(
    train: Train, base: Path, arrays: dict[str, Array], tmp_path: Path, capsys: Capture
) -> None:
    """A transformer alone, Qwen3-8B without its half for images, a base called Turbo, buckets of half a square."""
    save_file(tmp_path / "q.safetensors", below("model.diffusion_model.", arrays))
    shapes = {"model.embed_tokens.weight": (288, 4096), "model.layers.0.self_attn.q_norm.weight": (128,)}
    save_file(tmp_path / "qwen_3_8b.safetensors", {name: np.zeros(s, np.float16) for name, s in shapes.items()})
    shutil.copy(base, tmp_path / "qwen_image_2.1_turbo_bf16.safetensors")
    write_vocabulary(tmp_path, qwen=True)
    for setting, words in (
        (f"model.checkpoint={tmp_path / 'q.safetensors'}", ("model.vae", "text_encoders.qwen3")),
        (
            f"text_encoders.qwen3={tmp_path / 'qwen_3_8b.safetensors'}",
            ("expected Qwen3-VL-8B for Qwen-Image 2.1, found Qwen3-8B",),
        ),
        (f"model.checkpoint={tmp_path / 'qwen_image_2.1_turbo_bf16.safetensors'}", ("is called Turbo, so it is",)),
        ("data.bucket_step=16", ("expected a multiple of 32",)),
    ):
        assert train("--set", setting) != 0
        told = capsys.readouterr().err
        assert all(word in told for word in words), told


def test_the_licence_is_told(base: Path, capsys: Capture) -> None:
    said = "Qwen Research License: no commercial use"
    for command in (["inspect", str(base)], ["init", "qwenimage"], ["init", "qwenimage", "--preset", "style"]):
        assert cli.run(command) == 0
        assert said in " ".join(capsys.readouterr().out.replace("#", "").split()), command
    assert cli.run(["init", "krea2"]) == 0
    assert said not in capsys.readouterr().out
