"""Qwen-Image 2.1 from a config to a LoRA, on a small base with random weights, from files of every published kind."""

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
from flame_train.models.qwenimage.keys import lora_family
from flame_train.recipes.small import write_vocabulary
from flame_train.text_encoders.qwen3 import COMPREHENDING
from tests.recipes.bases import arrays_of, small_base

FP8 = ml_dtypes.float8_e4m3fn
Array = np.ndarray[Any, Any]
Capture = pytest.CaptureFixture[str]
Train = Callable[..., int]
TEXT = "text_encoders.qwen3vl_8b.transformer."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "qwenimage")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
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


def short(train: Train, folder: Path, *settings: str) -> list[float]:
    """The losses of two steps, whose run lies in `folder`."""
    given = [f"output.dir={folder}", "train.steps=2", "sample.every=0", *settings]
    assert train(*(word for setting in given for word in ("--set", setting))) == 0
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, drawn: Path, tmp_path: Path) -> None:
    """Both formats of its file are the same LoRA, and the cache keeps a caption's own tokens alone."""
    cached = ("--set", f"data.cache={tmp_path / 'cache'}")
    assert train(*cached) == 0
    run = tmp_path / "run"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    assert (run / "samples" / "step-000004.png").exists()
    whole = (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes()
    files = [from_file(path, lora_family()).state["transformer"] for path in sorted(run.glob("lora*.safetensors"))]
    assert len(files) == 2
    assert files[0].keys() == files[1].keys()
    assert len(files[0]) == 8 + 2 * 6  # what stands once, and six layers a block
    shutil.rmtree(run / "checkpoints" / "step-000004")
    for path in run.glob("lora*.safetensors"):
        path.unlink()
    assert train(*cached) == 0
    assert (run / "checkpoints" / "step-000004" / "lora.safetensors").read_bytes() == whole

    captions = {}
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        with SafetensorsFile(path) as file:
            if "qwen3" in file.names:
                captions[path] = len(file.read("qwen3"))
    around = len("user\n") + len("\nassistant\n") + 3  # three special tokens
    lengths = sorted(min(128, len(path.read_text().strip().encode()) + around) for path in drawn.glob("*.txt"))
    assert set(captions.values()) >= set(lengths)
    assert COMPREHENDING.opening not in COMPREHENDING.before


def test_separate_files_and_scaled_fp8_are_the_checkpoint(
    train: Train, base: Path, arrays: dict[str, Array], tmp_path: Path
) -> None:
    """ComfyUI's three files, of which the transformer has factors for its fp8 weights, give the same losses."""
    transformer, text = below("model.diffusion_model.", arrays), below(TEXT, arrays)
    linear = [name for name in transformer if ".img_mlp." in name or ".attn.to_out." in name]
    stored = {name: (8 * transformer[name].astype(np.float32)).astype(FP8) for name in linear}
    factors = {name.replace(".weight", ".scale_weight"): np.array(0.125, np.float32) for name in linear}
    rounded = {name: (array.astype(np.float32) * 0.125).astype(np.float16) for name, array in stored.items()}
    save_file(tmp_path / "q.safetensors", transformer | stored | factors | {"scaled_fp8": np.zeros(0, FP8)})
    save_file(tmp_path / "qwen3vl_8b.safetensors", text | {"visual.patch_embed.proj.bias": np.zeros(8, np.float16)})
    save_file(tmp_path / "whole.safetensors", arrays | {f"model.diffusion_model.{n}": a for n, a in rounded.items()})
    write_vocabulary(tmp_path, qwen=True)
    named = [f"model.vae={base}", f"text_encoders.qwen3={tmp_path / 'qwen3vl_8b.safetensors'}"]
    losses = [
        short(train, tmp_path / f"run-{file}", f"model.checkpoint={tmp_path / file}", *more)
        for file, more in (("q.safetensors", named), ("whole.safetensors", []))
    ]
    assert losses[0] == losses[1]


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
    said = "The Qwen Research Licence allows no commercial use"
    for command in (["inspect", str(base)], ["init", "qwenimage"], ["init", "qwenimage", "--preset", "style"]):
        assert cli.run(command) == 0
        assert said in capsys.readouterr().out, command
    assert cli.run(["init", "krea2"]) == 0
    assert said not in capsys.readouterr().out
