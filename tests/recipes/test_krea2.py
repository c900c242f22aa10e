"""Krea 2 from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flame_train import cli
from flame_train.adapters.formats import from_file
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.krea2.keys import lora_family
from flame_train.recipes.small import write_vocabulary
from tests.recipes.bases import arrays_of, small_base

FP8 = ml_dtypes.float8_e4m3fn
Array = np.ndarray[Any, Any]
Capture = pytest.CaptureFixture[str]
TEXT = "text_encoders.qwen3vl_4b.transformer."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "krea2")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Callable[..., int]:
    texts = sorted(drawn.glob("*.txt"))
    texts[0].write_text(texts[0].read_text() + ", with so many words behind it that it takes more rows than the others")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\ncheckpoint = "{base}"\n[data]\npath = "{drawn}"\nresolution = 64\nbucket_step = 32\n'
        'batch_size = 2\n[lora]\nrank = 2\nalpha = 2.0\ntargets = ["full"]\n[train]\nsteps = 4\nprecision = "fp32"\n'
        '[checkpoint]\nevery = 2\n[sample]\nevery = 4\nprompts = ["a red circle"]\nsteps = 2\n[output]\n'
        f'format = "both"\ndir = "{tmp_path / "run"}"\n[text_encoders]\nqwen3_tokens = 128\n'
    )
    return lambda *settings: cli.run(["train", str(config), "--device", "cpu", *settings])


def below(prefix: str, arrays: dict[str, Array]) -> dict[str, Array]:
    """A component's tensors without their prefix."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def short(train: Callable[..., int], folder: Path, *settings: str) -> list[float]:
    """The losses of two steps, whose run lies in `folder`."""
    given = [f"output.dir={folder}", "train.steps=2", "sample.every=0", *settings]
    assert train(*(word for setting in given for word in ("--set", setting))) == 0
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_and_its_continuation_give_the_same_bytes(train: Callable[..., int], tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    assert train() == 0
    run = tmp_path / "run"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    assert (run / "samples" / "step-000004.png").exists()
    whole = (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes()
    files = [from_file(path, lora_family()).state["transformer"] for path in sorted(run.glob("lora*.safetensors"))]
    assert len(files) == 2
    assert files[0].keys() == files[1].keys()
    assert len(files[0]) == 8 + 4 * 8  # what stands once, and eight layers a block
    shutil.rmtree(run / "checkpoints" / "step-000004")
    for path in run.glob("lora*.safetensors"):
        path.unlink()
    assert train() == 0
    assert (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes() == whole


def test_separate_files_and_scaled_fp8_are_the_checkpoint(
    train: Callable[..., int], base: Path, arrays: dict[str, Array], tmp_path: Path
) -> None:
    """ComfyUI's three files, of which the transformer has factors for its fp8 weights, give the same losses."""
    transformer, text = below("model.diffusion_model.", arrays), below(TEXT, arrays)
    linear = [name for name in transformer if ".mlp." in name or ".attn.wo." in name]
    stored = {name: (8 * transformer[name].astype(np.float32)).astype(FP8) for name in linear}
    factors = {name.replace(".weight", ".scale_weight"): np.array(0.125, np.float32) for name in linear}
    rounded = {name: (array.astype(np.float32) * 0.125).astype(np.float16) for name, array in stored.items()}
    save_file(tmp_path / "k.safetensors", transformer | stored | factors | {"scaled_fp8": np.zeros(0, FP8)})
    save_file(tmp_path / "qwen3vl_4b.safetensors", text | {"visual.patch_embed.proj.bias": np.zeros(8, np.float16)})
    save_file(tmp_path / "whole.safetensors", arrays | {f"model.diffusion_model.{n}": a for n, a in rounded.items()})
    write_vocabulary(tmp_path, qwen=True)
    named = [f"model.vae={base}", f"text_encoders.qwen3={tmp_path / 'qwen3vl_4b.safetensors'}"]
    losses = [
        short(train, tmp_path / f"run-{file}", f"model.checkpoint={tmp_path / file}", *more)
        for file, more in (("k.safetensors", named), ("whole.safetensors", []))
    ]
    assert losses[0] == losses[1]


def test_what_the_transformer_alone_lacks_is_told(
    arrays: dict[str, Array], tmp_path: Path, train: Callable[..., int], capsys: Capture
) -> None:
    save_file(tmp_path / "k.safetensors", below("model.diffusion_model.", arrays))
    assert train("--set", f"model.checkpoint={tmp_path / 'k.safetensors'}") != 0
    told = capsys.readouterr().err
    assert "model.vae" in told
    assert "text_encoders.qwen3" in told


def test_a_qwen3_without_the_half_for_images_is_another_text_encoder(
    tmp_path: Path, train: Callable[..., int], capsys: Capture
) -> None:
    """Qwen3-4B has the shapes of Qwen3-VL-4B's text half, other weights and other rotary frequencies."""
    shapes = {"model.embed_tokens.weight": (288, 2560), "model.layers.0.self_attn.q_norm.weight": (128,)}
    save_file(tmp_path / "qwen_3_4b.safetensors", {name: np.zeros(s, np.float16) for name, s in shapes.items()})
    assert train("--set", f"text_encoders.qwen3={tmp_path / 'qwen_3_4b.safetensors'}") != 0
    assert "expected Qwen3-VL-4B for Krea 2, found Qwen3-4B" in capsys.readouterr().err


def test_the_cache_keeps_states_in_bf16_without_padding(train: Callable[..., int], drawn: Path, tmp_path: Path) -> None:
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


def test_a_run_on_raw_is_looked_at_with_turbo(
    train: Callable[..., int], arrays: dict[str, Array], tmp_path: Path
) -> None:
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


def test_turbo_is_refused_as_a_base(train: Callable[..., int], base: Path, tmp_path: Path, capsys: Capture) -> None:
    turbo = tmp_path / "krea2_turbo_bf16.safetensors"
    shutil.copy(base, turbo)
    write_vocabulary(tmp_path, qwen=True)
    assert train("--set", f"model.checkpoint={turbo}") != 0
    assert "krea2_turbo_bf16.safetensors is called Turbo, so it is distilled" in capsys.readouterr().err


def test_texts_that_take_much_room_are_told_before_they_are_encoded(
    train: Callable[..., int],
    drawn: Path,
    tmp_path: Path,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each image there are several texts, which take more than the images; the disk has room for neither."""
    for path in drawn.glob("*.txt"):
        path.write_text(f"{path.read_text().strip()}, drawn, small, round")
    monkeypatch.setattr("flame_train.run.encode._MUCH", 0)
    monkeypatch.setattr("flame_train.disk.files.free_bytes", lambda folder: 1000)
    monkeypatch.setattr("flame_train.run.commands.stages.preflight", lambda *args: None)
    given = [f"data.cache={tmp_path / 'cache'}", "captions.shuffle=true", "captions.variants=3", "train.steps=1"]
    assert train(*(word for setting in given for word in ("--set", setting))) != 0
    error = capsys.readouterr().err
    assert "set data.cache to another disk, or lower captions.variants: an image has up to 3 texts" in error
    assert "cache: fewer texts take less; see captions.variants" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
