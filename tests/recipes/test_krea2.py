"""Krea 2 from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.small import write_vocabulary
from flame_train.models.krea2.names import lora_family
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
TEXT = "text_encoders.qwen3vl_4b.transformer."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "krea2")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, with_a_longer_caption(drawn), tmp_path, "qwen3_tokens = 128")


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    check_continuation(train, tmp_path / "run", lora_family(), 8 + 4 * 8)  # what stands once, and eight layers a block


def test_separate_files_and_scaled_fp8_are_the_checkpoint(train: Train, base: Path, tmp_path: Path) -> None:
    check_separate_files(train, base, tmp_path, TEXT, (".mlp.", ".attn.wo."))


def test_what_the_transformer_alone_lacks_is_told(
    arrays: dict[str, Array], tmp_path: Path, train: Train, capsys: Capture
) -> None:
    save_file(tmp_path / "k.safetensors", below("model.diffusion_model.", arrays))
    assert train("--set", f"model.checkpoint={tmp_path / 'k.safetensors'}") != 0
    told = capsys.readouterr().err
    assert "model.vae" in told
    assert "text_encoders.qwen3" in told


def test_a_qwen3_without_the_half_for_images_is_another_text_encoder(
    tmp_path: Path, train: Train, capsys: Capture
) -> None:
    """Qwen3-4B has the shapes of Qwen3-VL-4B's text half, other weights and other rotary frequencies."""
    shapes = {"model.embed_tokens.weight": (288, 2560), "model.layers.0.self_attn.q_norm.weight": (128,)}
    save_file(tmp_path / "qwen_3_4b.safetensors", {name: np.zeros(s, np.float16) for name, s in shapes.items()})
    assert train("--set", f"text_encoders.qwen3={tmp_path / 'qwen_3_4b.safetensors'}") != 0
    assert "expected Qwen3-VL-4B for Krea 2, found Qwen3-4B" in capsys.readouterr().err


def test_the_cache_keeps_states_in_bf16_without_padding(train: Train, drawn: Path, tmp_path: Path) -> None:
    """Whatever they are computed in; the losses stay within its rounding of those of states that no cache held."""
    kept = short(train, tmp_path / "kept", f"data.cache={tmp_path / 'cache'}")
    captions = {}
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        with SafetensorsFile(path) as file:
            if "qwen3" in file.names:
                captions[path] = file.read("qwen3")
    assert {array.dtype for array in captions.values()} == {np.dtype(ml_dtypes.bfloat16)}
    lengths = sorted(len(path.read_text().strip().encode()) + 13 for path in drawn.glob("*.txt"))
    assert {len(array) for array in captions.values()} >= {min(128, length) for length in lengths}
    np.testing.assert_allclose(kept, short(train, tmp_path / "not", "text_encoders.cache=off"), rtol=1e-3)


def test_a_run_on_raw_is_looked_at_with_turbo(train: Train, arrays: dict[str, Array], tmp_path: Path) -> None:
    """Its images come from the other denoiser, in eight steps without guidance; what is trained is the same."""
    transformer = below("model.diffusion_model.", arrays)
    turbo = {name: array * np.float16(1.25) for name, array in transformer.items()}
    save_file(tmp_path / "krea2_turbo_bf16.safetensors", turbo)
    grids, loras = [], []
    for name, model in (("raw", ""), ("turbo", tmp_path / "krea2_turbo_bf16.safetensors")):
        run = tmp_path / name
        asked = [f"output.dir={run}", "train.steps=2", "sample.every=2", "sample.steps=0", f"sample.model={model}"]
        assert train(*(word for setting in asked for word in ("--set", setting))) == 0
        grids.append((run / "samples" / "step-000002.png").read_bytes())
        loras.append((run / "checkpoints" / "step-000002" / "optimizer.safetensors").read_bytes())
    assert grids[0] != grids[1]
    assert loras[0] == loras[1]


def test_turbo_is_refused_as_a_base(train: Train, base: Path, tmp_path: Path, capsys: Capture) -> None:
    turbo = tmp_path / "krea2_turbo_bf16.safetensors"
    shutil.copy(base, turbo)
    write_vocabulary(tmp_path, qwen=True)
    assert train("--set", f"model.checkpoint={turbo}") != 0
    assert "krea2_turbo_bf16.safetensors is called Turbo, so it is distilled" in capsys.readouterr().err


def test_texts_that_take_much_room_are_told_before_they_are_encoded(
    train: Train,
    drawn: Path,
    tmp_path: Path,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each image there are several texts, which take more than the images; the disk has room for neither."""
    for path in drawn.glob("*.txt"):
        path.write_text(f"{path.read_text().strip()}, drawn, small, round")
    monkeypatch.setattr("flame_train.run.encode.encode._MUCH", 0)
    monkeypatch.setattr("flame_train.disk.preflight.free_bytes", lambda folder: 1000)
    monkeypatch.setattr("flame_train.run.plan.start.preflight", lambda *args: None)
    given = [f"data.cache={tmp_path / 'cache'}", "captions.shuffle=true", "captions.variants=3", "train.steps=1"]
    assert train(*(word for setting in given for word in ("--set", setting))) != 0
    error = capsys.readouterr().err
    assert "set data.cache to another disk, or lower captions.variants: an image has up to 3 texts" in error
    assert "cache: fewer texts take less; see captions.variants" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
