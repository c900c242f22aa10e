"""Anima from a config to a LoRA, on a small base with random weights, from files of every published kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.io.keymap import Op
from flame_train.io.safetensors import save_file
from flame_train.models.anima.names import lora_family
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import family_of
from flame_train.networks.vae.names import qwen_vae_from_wan
from tests.recipes.bases import (
    FP8,
    Array,
    Train,
    below,
    check_continuation,
    options,
    short,
    small_base,
    trainer,
    with_a_longer_caption,
)
from tests.run_files import arrays_of

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "anima")


@pytest.fixture(scope="module")
def arrays(base: Path) -> dict[str, Array]:
    return arrays_of(base)


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    sorted(with_a_longer_caption(drawn).glob("*.txt"))[1].write_text("")
    return trainer(base, drawn, tmp_path, "qwen3_tokens = 128")


def as_wan(vae: dict[str, Array]) -> dict[str, Array]:
    """The VAE as published: Wan 2.1's names, kernels that last three frames, and convolutions between frames."""
    made = {"encoder.downsamples.3.time_conv.bias": np.zeros(3, np.float16)}
    for rule in qwen_vae_from_wan(4, 1).rules:
        (name,) = rule.source
        if rule.target[0] in vae:
            here = np.concatenate([vae[target] for target in rule.target])
            match rule.op:
                case Op.FLAT:
                    here = here.reshape(-1, 1, 1, 1)
                case Op.LAST:
                    here = np.stack([here * 3, here], axis=2)
            made[name] = here
    return made


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, base: Path, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    assert family_of(base).name == "anima"
    check_continuation(train, tmp_path / "run", lora_family(), 32)


def test_separate_files_and_scaled_fp8_are_the_checkpoint(
    train: Train, arrays: dict[str, Array], tmp_path: Path
) -> None:
    """ComfyUI's three files, of which the transformer has factors for its fp8 weights, give the same first loss."""
    transformer = below("model.diffusion_model.", arrays)
    linear = [name for name in transformer if ".mlp.layer" in name or ".mlp.2.weight" in name]
    stored = {name: (8 * transformer[name].astype(np.float32)).astype(FP8) for name in linear}
    factors = {name.replace(".weight", ".scale_weight"): np.array(0.125, np.float32) for name in linear}
    rounded = {name: (array.astype(np.float32) * 0.125).astype(np.float16) for name, array in stored.items()}
    comfy = transformer | stored | factors | {"scaled_fp8": np.zeros(0, FP8)}
    save_file(tmp_path / "anima.safetensors", {f"net.{name}": array for name, array in comfy.items()})
    save_file(tmp_path / "qwen_3_06b_base.safetensors", below("text_encoders.qwen3_06b.transformer.", arrays))
    save_file(tmp_path / "vae.safetensors", as_wan(below("first_stage_model.", arrays)))
    save_file(tmp_path / "whole.safetensors", arrays | {f"model.diffusion_model.{n}": a for n, a in rounded.items()})
    write_vocabulary(tmp_path, qwen=True)
    cache, text = tmp_path / "encoded", tmp_path / "qwen_3_06b_base.safetensors"
    named = [f"model.vae={tmp_path / 'vae.safetensors'}", f"text_encoders.qwen3={text}"]
    losses = [
        short(train, tmp_path / f"run-{file}", f"model.checkpoint={tmp_path / file}", f"data.cache={cache}", *more)
        for file, more in (("anima.safetensors", named), ("whole.safetensors", []))
    ]
    assert losses[0] == losses[1]


def test_what_a_file_lacks_is_told(arrays: dict[str, Array], tmp_path: Path, train: Train, capsys: Capture) -> None:
    """The other parts of the model, the adapter of the text, and a tensor that nothing knows."""
    transformer = below("model.diffusion_model.", arrays)
    bare = {name: array for name, array in transformer.items() if not name.startswith("llm_adapter.")}
    (whole := dict(arrays)).pop("model.diffusion_model.llm_adapter.norm.weight")
    for made, words in (
        (transformer, ["model.vae", "text_encoders.qwen3"]),
        (bare, ["Cosmos-Predict2"]),
        (transformer | {"spare.weight": np.zeros(3, np.float16)}, ["spare.weight"]),
        (whole, ["norm.weight"]),
    ):
        save_file(tmp_path / "file.safetensors", made)
        assert train(*options(f"model.checkpoint={tmp_path / 'file.safetensors'}")) != 0
        told = capsys.readouterr().err
        assert all(word in told for word in words), told


def test_a_base_in_8_bits_trains_with_captions_encoded_in_the_step(train: Train, tmp_path: Path) -> None:
    """The text made in the step is what the cache would hold."""
    fp8 = "model.quantize=fp8"
    losses = [short(train, tmp_path / c, fp8, f"text_encoders.cache={c}")[0] for c in ("auto", "off")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_images_encoded_by_tiles_are_kept_apart_from_whole_ones(train: Train, tmp_path: Path) -> None:
    """Tiles that images fit into change nothing; smaller ones are encoded anew, to almost the same loss."""
    larger = "data.resolution=128"
    losses = [short(train, tmp_path / str(t), larger, f"model.vae_tile={t}")[0] for t in (0, 1024, 64)]
    assert losses[0] == losses[1] != losses[2]
    np.testing.assert_allclose(losses[0], losses[2], rtol=0.05)


def test_a_lora_with_layers_of_the_adapter_draws_as_merged(
    base: Path, arrays: dict[str, Array], tmp_path: Path
) -> None:
    """sd-scripts can train them. In fp32, by ComfyUI's names, the two images are within rounding of 8 bits."""
    rng = np.random.default_rng(0)
    layers = {"blocks.0.self_attn.q_proj": (64, 64), "llm_adapter.blocks.0.cross_attn.k_proj": (32, 32)}
    tensors = {}
    for name, (rows, width) in layers.items():
        for end, shape in (("lora_A", (2, width)), ("lora_B", (rows, 2))):
            tensors[f"diffusion_model.{name}.{end}.weight"] = rng.standard_normal(shape).astype(np.float32)
    lora, exact, merged = (tmp_path / f"{name}.safetensors" for name in ("lora", "exact", "merged"))
    save_file(lora, tensors)
    save_file(exact, {name: array.astype(np.float32) for name, array in arrays.items()})
    write_vocabulary(tmp_path, qwen=True)
    assert cli.run(["merge", str(exact), str(lora), str(merged)]) == 0
    images = []
    for checkpoint, more in ((exact, ["--lora", str(lora)]), (merged, []), (exact, [])):
        out = tmp_path / f"{len(images)}.png"
        size = ["--width", "64", "--height", "64", "--steps", "2", "--precision", "fp32", "--device", "cpu"]
        assert cli.run(["sample", "-m", str(checkpoint), "-p", "a cat", "-o", str(out), *size, *more]) == 0
        with Image.open(out) as drawn:
            images.append(np.asarray(drawn).astype(int))
    assert np.abs(images[0] - images[1]).max() <= 1 < np.abs(images[0] - images[2]).max()
