"""What the tests of families with random small bases share: the base, its arrays, and a run's first loss."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flame_train import cli
from flame_train.adapters.formats import from_file
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import save_file
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import FAMILIES
from tests.run_files import arrays_of, log_of, losses_of

Array = np.ndarray[Any, Any]
Train = Callable[..., int]
FP8 = ml_dtypes.float8_e4m3fn
T5_TOKENS = {"sdxl": {}, "sd3": {"text_encoders.t5_tokens": "77"}, "flux": {"text_encoders.t5_tokens": "77"}}


def small_base(factory: pytest.TempPathFactory, family: str) -> Path:
    """A small checkpoint of the family with random weights, with what it needs beside it."""
    folder = factory.mktemp(family)
    FAMILIES[family].write_small_base(folder, 3)
    return folder / "base.safetensors"


def first_loss(run: Path) -> float:
    """The loss of the first step in a run folder's log."""
    return float(json.loads((run / "log.jsonl").read_text().splitlines()[0])["loss"])


def below(prefix: str, arrays: dict[str, Array]) -> dict[str, Array]:
    """A component's tensors without their prefix."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def trainer(base: Path, images: Path, folder: Path, tokens: str = "", bucket_step: int = 32) -> Train:
    """Trains on the base for four steps, with options more; `tokens` is a setting of `[text_encoders]`."""
    config = folder / "config.toml"
    config.write_text(
        f'[model]\ncheckpoint = "{base}"\n[text_encoders]\n{tokens}\n[data]\npath = "{images}"\nresolution = 64\n'
        f'cache = "{base.parent / "encoded"}"\n'
        f"bucket_step = {bucket_step}\nbatch_size = 2\n[lora]\nrank = 2\nalpha = 2.0\n"
        'targets = ["full"]\n[train]\nsteps = 4\nprecision = "fp32"\n[checkpoint]\nevery = 2\n'
        '[sample]\nevery = 4\nprompts = ["a red circle"]\nsteps = 2\n[output]\n'
        f'format = "both"\ndir = "{folder / "run"}"\n'
    )
    return lambda *options: cli.run(["train", str(config), "--device", "cpu", *options])


def settings(keys: Mapping[str, str]) -> list[str]:
    """Keys and their values as options of the command line."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def options(*settings: str) -> tuple[str, ...]:
    """Settings as options of the command line."""
    return tuple(word for setting in settings for word in ("--set", setting))


def short(train: Train, folder: Path, *settings: str) -> list[float]:
    """The losses of two steps, whose run lies in `folder`."""
    assert train(*options(f"output.dir={folder}", "train.steps=2", "sample.every=0", *settings)) == 0
    return losses_of(folder)


def lose_end(run: Path) -> None:
    """Leaves of a finished run what it had before its last checkpoint: started again, it goes on from there."""
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    for path in run.glob("lora*.safetensors"):
        path.unlink()


def rewrite_state(checkpoint: Path, text: str) -> None:
    """Replaces what a checkpoint says of itself, its manifest too."""
    (checkpoint / "state.json").write_text(text)
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


def forget(checkpoint: Path, name: str) -> None:
    """Leaves of a checkpoint what a version wrote that did not record this."""
    state = json.loads((checkpoint / "state.json").read_text())
    assert state.pop(name)
    rewrite_state(checkpoint, json.dumps(state))


def check_continuation(train: Train, run: Path, names: LoraFamily, layers: int, denoiser: str = "transformer") -> None:
    """A run whose end is lost continues to the same bytes, and both formats of its file are the same LoRA.

    `layers` is how many of the `denoiser` have one.
    """
    assert train() == 0
    log = log_of(run)
    assert [row["step"] for row in log] == [1, 2, 3, 4]
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    assert (run / "samples" / "step-000004.png").exists()
    last = run / "checkpoints" / "step-000004"
    whole = (last / "lora.safetensors").read_bytes()
    found = sorted(run.glob("lora*.safetensors"))
    one, other = (from_file(path, names).state[denoiser] for path in found)
    assert one.keys() == other.keys()
    assert len(one) == layers
    lose_end(run)
    assert train() == 0
    assert (last / "lora.safetensors").read_bytes() == whole


def check_separate_files(
    train: Train,
    base: Path,
    folder: Path,
    text: str,
    scaled: tuple[str, ...],
    key: str = "qwen3",
    vae: Path | None = None,
) -> None:
    """Separate files give the same losses as the checkpoint; the transformer's has factors for its fp8 weights.

    Args:
        train: what `trainer` made.
        base: the checkpoint.
        folder: where the files are written.
        text: the prefix of the text encoder's tensors in the checkpoint.
        scaled: parts of the names of the weights in fp8.
        key: the text encoder's.
        vae: a file of the VAE alone; without one it is read from the checkpoint.
    """
    arrays = arrays_of(base)
    transformer = below("model.diffusion_model.", arrays)
    linear = [name for name in transformer if any(part in name for part in scaled)]
    assert linear
    stored = {name: (8 * transformer[name].astype(np.float32)).astype(FP8) for name in linear}
    factors = {name.replace(".weight", ".scale_weight"): np.array(0.125, np.float32) for name in linear}
    rounded = {name: (array.astype(np.float32) * 0.125).astype(np.float16) for name, array in stored.items()}
    save_file(folder / "apart.safetensors", transformer | stored | factors | {"scaled_fp8": np.zeros(0, FP8)})
    images, words = np.zeros(8, np.float16), np.zeros(8, np.uint8)  # which play no part in the network
    unused = {"spiece_model": words} if key == "t5" else {"visual.patch_embed.proj.bias": images}
    save_file(folder / "text.safetensors", below(text, arrays) | unused)
    save_file(folder / "whole.safetensors", arrays | {f"model.diffusion_model.{n}": a for n, a in rounded.items()})
    write_vocabulary(folder, qwen=key == "qwen3", mistral=key == "mistral")
    named = [f"model.vae={vae or base}", f"text_encoders.{key}={folder / 'text.safetensors'}"]
    cache = f"data.cache={folder / 'encoded'}"  # the separate files are to be used for the captions, too
    losses = [
        short(train, folder / f"run-{file}", f"model.checkpoint={folder / file}", cache, *more)
        for file, more in (("apart.safetensors", named), ("whole.safetensors", []))
    ]
    assert losses[0] == losses[1]


def with_a_longer_caption(images: Path) -> Path:
    """The folder of images, one of whose captions takes more rows than the others."""
    texts = sorted(images.glob("*.txt"))
    texts[0].write_text(texts[0].read_text() + ", with so many words behind it that it takes more rows than the others")
    return images
