"""Qwen-Image 1 from a config to a LoRA, on a small base with random weights."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.config.schema import ModelSection
from flame_train.errors import ConfigError
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.small import write_vocabulary
from flame_train.models.qwenimage1.family import QwenImage1Model
from flame_train.models.qwenimage1.names import lora_family
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from tests.recipes.bases import Train, below, check_continuation, options, short, small_base, trainer
from tests.run_files import arrays_of

NAMED = ("modelspec.title", "ss_output_name", "flame_train_config", "modelspec.hash_sha256", "sshs_model_hash")
"""What follows from the name of the run folder, or has it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "qwenimage1")


@pytest.fixture
def train(base: Path, drawn: Path, tmp_path: Path) -> Train:
    return trainer(base, drawn, tmp_path, "qwen3_tokens = 128")


def test_a_run_and_its_continuation_give_the_same_bytes(train: Train, tmp_path: Path) -> None:
    """And both formats of its file are the same LoRA."""
    layers = 6 + 2 * 14  # what stands once, and fourteen layers a block
    check_continuation(train, tmp_path / "run", lora_family(), layers)


def test_separate_files_are_the_checkpoint(train: Train, base: Path, tmp_path: Path) -> None:
    """ComfyUI's three files give the same losses, with blocks that wait in host memory."""
    arrays, prefix = arrays_of(base), "text_encoders.qwen25_7b.transformer."
    parts = {"q.safetensors": "model.diffusion_model.", "qwen_2.5_vl_7b.safetensors": prefix}
    for file, start in parts.items():
        save_file(tmp_path / file, below(start, arrays))
    write_vocabulary(tmp_path, qwen=True)
    separate = [f"model.checkpoint={tmp_path / 'q.safetensors'}", f"model.vae={base}"]
    separate += [f"text_encoders.qwen3={tmp_path / 'qwen_2.5_vl_7b.safetensors'}"]
    separate += ["model.offload=1.0", "gradient.checkpointing=full", f"data.cache={tmp_path / 'encoded'}"]
    assert short(train, tmp_path / "apart", *separate) == short(train, tmp_path / "whole")


def test_a_run_of_its_own_config_writes_the_same_metadata(train: Train, tmp_path: Path) -> None:
    """The config in a run folder has every key, also those of other families."""
    short(train, tmp_path / "run")
    again = tmp_path / "again"
    argv = ["train", str(tmp_path / "run" / "config.toml"), "--device", "cpu", *options(f"output.dir={again}")]
    assert cli.run(argv) == 0
    found = []
    for run in (tmp_path / "run", again):
        with SafetensorsFile(next(run.glob("lora*.safetensors"))) as file:
            found.append({k: v for k, v in file.metadata.items() if k not in NAMED})
    assert found[0] == found[1]


def test_another_qwens_states_are_refused(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"model.embed_tokens.weight": (288, 4096), "model.layers.0.self_attn.q_norm.weight": (128,)}
    save_file(tmp_path / "qwen_3_8b.safetensors", {name: np.zeros(s, np.float16) for name, s in shapes.items()})
    assert train("--set", f"text_encoders.qwen3={tmp_path / 'qwen_3_8b.safetensors'}") != 0
    assert "expected Qwen2.5-VL-7B for Qwen-Image 1, found Qwen3-8B" in capsys.readouterr().err


def test_the_command_that_a_run_prints_has_its_control_images_and_what_reads_them(
    train: Train, drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without these options an edit would be drawn from the text alone, or its caption cut."""
    one, two = (str(path) for path in sorted(drawn.glob("*.png"))[:2])
    prompt = f'sample.prompts=[{{text = "make it red", control = ["{one}", "{two}"]}}]'
    more = "model.qwen_edit=2509", "text_encoders.qwen3_tokens=1024", "text_encoders.precision=fp32"
    assert train(*options(prompt, *more), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    command = shlex.split(next(line for line in result["next"] if "draw with it" in line).partition(": ")[2])
    said = " ".join(command)
    for part in (
        "--qwen-edit 2509",
        "--qwen3-tokens 1024",
        "--text-precision fp32",
        f"--control {one} --control {two}",
        "--resolution 64",
    ):
        assert part in said
    assert "--width" not in command  # the first control image says the size
    assert cli.run([*command[1:], "-o", str(tmp_path / "again.png")]) == 0
    places = tmp_path / "run" / "samples" / "step-000004.png", tmp_path / "again.png"
    last, again = (np.asarray(Image.open(place), int) for place in places)
    assert last.shape == again.shape
    assert np.abs(last - again).max() <= 1


@pytest.mark.parametrize(
    ("name", "edit", "refused"),
    [
        ("qwen_image_edit_2511_fp8mixed", "2511", ""),
        ("qwen_image_edit_2509_fp8_e4m3fn", "2509", ""),
        ("Qwen-Image-Edit-Plus", "2509", ""),
        ("models--Qwen--Qwen-Image-Edit-2511/snapshots/1/base", "2511", ""),
        ("qwen_image_edit_bf16", "first", "this is the first Qwen-Image-Edit"),
        ("qwen_image_2512_bf16", "", "nothing says that this checkpoint is Qwen-Image-Edit"),
    ],
)
def test_which_qwen_image_edit_a_file_is(base: Path, tmp_path: Path, name: str, edit: str, refused: str) -> None:
    """A name says it, or a key where it does not; a key that contradicts the name is refused."""
    file = tmp_path / f"{name}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(base)
    opening = replace(NOTHING_NAMED, base=file)
    model = FAMILIES["qwenimage1"].open(opening)
    assert isinstance(model, QwenImage1Model)
    assert model.edit == edit
    assert model.controls.problem(3).startswith(refused)
    assert bool(model.controls.problem(3)) == bool(refused)
    said = replace(opening, model=ModelSection(qwen_edit="2509"))
    if edit == "2511":
        with pytest.raises(ConfigError, match=r'expected "2511" for .*, got "2509"; remove it'):
            FAMILIES["qwenimage1"].open(said)
    else:
        assert not FAMILIES["qwenimage1"].open(said).controls.problem(3)
