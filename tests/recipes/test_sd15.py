"""Stable Diffusion 1.5 from a config to a LoRA, on a small base with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.sd15.names import lora_family
from flame_train.models.sdxl.names_unet import SD_LEVELS, unet_from_diffusers
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from tests.recipes.bases import Train, below, check_continuation, options, short, small_base, trainer
from tests.run_files import arrays_of

UNET, CLIP = "model.diffusion_model.", "cond_stage_model.transformer."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "sd15")


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, drawn, tmp_path, bucket_step=64)


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """With clip skip, CLIP trained too: names and metadata of the file are those of sd-scripts' own."""
    more = options(
        "text_encoders.clip_skip=2", 'text_encoders.train=["clip"]', 'text_encoders.targets=["attention+mlp"]'
    )
    check_continuation(lambda *other: train(*more, *other), tmp_path / "run", lora_family(False, False), 278, "unet")
    with SafetensorsFile(tmp_path / "run" / "lora.safetensors") as file:
        names, metadata = set(file.names), file.metadata
    assert {name.partition(".")[0] for name in names if name.startswith("lora_te")} == {
        f"lora_te_text_model_encoder_layers_0_{part}"  # of two layers; the state behind the last is not taken
        for part in (*(f"self_attn_{p}_proj" for p in ("q", "k", "v", "out")), "mlp_fc1", "mlp_fc2")
    }
    told = ("ss_base_model_version", "ss_v2", "ss_clip_skip", "modelspec.encoder_layer", "modelspec.prediction_type")
    assert [metadata[name] for name in told] == ["sd_v1", "False", "2", "2", "epsilon"]
    assert metadata["modelspec.architecture"] == "stable-diffusion-v1/lora"


def test_separate_files_are_the_checkpoint_and_captions_in_the_step_those_of_the_cache(
    train: Train, base: Path, tmp_path: Path
) -> None:
    arrays = arrays_of(base)
    save_file(tmp_path / "unet.safetensors", below(UNET, arrays))
    save_file(tmp_path / "clip.safetensors", below(CLIP, arrays))
    separate = [f"model.checkpoint={tmp_path / 'unet.safetensors'}", f"model.vae={base}"]
    separate += [f"text_encoders.clip={tmp_path / 'clip.safetensors'}", "text_encoders.cache=off"]
    assert short(train, tmp_path / "apart", *separate) == short(train, tmp_path / "whole")


def test_clip_skip_and_the_prediction_change_the_loss(train: Train, tmp_path: Path) -> None:
    changes = ("text_encoders.clip_skip=2", "model.prediction=v")
    usual, *others = (short(train, tmp_path / f"run-{c}", *[c][: bool(c)]) for c in ("", *changes))
    assert len({tuple(losses) for losses in (usual, *others)}) == 3


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("text_encoders.clip_skip=3", "text_encoders.clip_skip: expected at most 2, the layers of this CLIP, got 3"),
        ("model.prediction=flow", 'model.prediction: expected "epsilon" or "v" for SD 1.5 or 2.1, got "flow"'),
        ("loss.shift=3.0", "loss.shift: it has no effect on SD 1.5 or 2.1"),
        ("text_encoders.clip_l=x", "text_encoders.clip_l: it has no effect on SD 1.5 or 2.1"),
        ("data.bucket_step=32", "data.bucket_step: expected a multiple of 64"),
    ],
)
def test_what_means_nothing_here_is_refused(
    train: Train, setting: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*options(setting)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("channels", "what"), [(9, "inpainting"), (8, "InstructPix2Pix")])
def test_files_that_see_a_second_image_are_refused_by_name(
    train: Train, base: Path, tmp_path: Path, channels: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = arrays_of(base)
    first = arrays[f"{UNET}input_blocks.0.0.weight"]
    arrays[f"{UNET}input_blocks.0.0.weight"] = np.zeros((first.shape[0], channels, 3, 3), first.dtype)
    save_file(tmp_path / "other.safetensors", arrays)
    assert train(*options(f"model.checkpoint={tmp_path / 'other.safetensors'}")) == 3
    assert what in capsys.readouterr().err


def test_a_folder_that_predicts_v_and_sees_a_second_image_is_refused_for_the_image(
    train: Train, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the upscaler of Stable Diffusion 2 is published: another prediction would not make it a base."""
    native = below(UNET, arrays_of(base))
    sources = unet_from_diffusers(SD_LEVELS).inverse.pull(native).sources
    unet = {name: source.read(SimpleNamespace(read=native.__getitem__)) for name, source in sources.items()}
    unet["conv_in.weight"] = np.zeros((unet["conv_in.weight"].shape[0], 7, 3, 3), np.float16)
    for part in ("unet", "scheduler"):
        (tmp_path / "x4" / part).mkdir(parents=True)
    save_file(tmp_path / "x4/unet/diffusion_pytorch_model.safetensors", unet)
    (tmp_path / "x4/scheduler/scheduler_config.json").write_text('{"prediction_type": "v_prediction"}')
    assert train(*options(f"model.checkpoint={tmp_path / 'x4'}")) == 3
    assert "an upscaling model" in capsys.readouterr().err


def test_another_models_clip_is_refused_under_the_name_of_samples_option(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ClipTextEncoder(ClipArch.tiny("quick_gelu", None, 48))
    wide.init(np.random.default_rng(0), "float16")
    save_file(tmp_path / "clip.safetensors", {name: weight.numpy() for name, weight in wide.weights()})
    command = f"sample -m {base} -p cat --steps 1 --width 64 --height 64 --device cpu -o {tmp_path / 'a.png'}".split()
    assert cli.run([*command, "--clip", str(tmp_path / "clip.safetensors")]) == 3
    assert "error: --clip: " in capsys.readouterr().err


def test_an_image_says_its_clip_skip(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the PNG under the name that A1111 and Forge read, and in the result; nothing is said of the last layer."""
    command = f"sample -m {base} -p cat --steps 1 --width 64 --height 64 --device cpu --json".split()
    for skip, said in ((1, False), (2, True)):
        file = tmp_path / f"{skip}.png"
        assert cli.run([*command, "--clip-skip", str(skip), "-o", str(file)]) == 0
        with Image.open(file) as image:
            assert ("Clip skip: 2" in image.info["parameters"]) == said
        assert json.loads(capsys.readouterr().out).get("clip_skip") == (2 if said else None)
