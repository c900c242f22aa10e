"""Networks and files that a run finds where other programs keep them, and why it takes none that is another."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common import found_parts
from flame_train.models.registry import FAMILIES

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Z-Image as ComfyUI keeps it: its transformer, and a models folder with the other networks."""
    folder = tmp_path_factory.mktemp("files")
    FAMILIES["zimage"].write_small_base(folder, 3)
    with SafetensorsFile(folder / "base.safetensors") as file:
        arrays = {name: np.array(file.read(name)) for name in file.names}
    places = {
        "model.diffusion_model.": "z_image.safetensors",
        "first_stage_model.": "models/vae/ae.safetensors",
        "text_encoders.qwen3_4b.transformer.": "models/text_encoders/qwen_3_4b.safetensors",
    }
    for prefix, place in places.items():
        tensors = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        save_file(folder / place, tensors)
    (folder / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (64, 64), (number * 90, 0, 0)).save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text("a red shape")
    return folder


@pytest.fixture
def comfy(files: Path, tmp_path: Path) -> Path:
    """A models folder of its own, which a test may change."""
    return Path(shutil.copytree(files / "models", tmp_path / "ComfyUI" / "models"))


def config(files: Path, folder: Path, **model: str) -> Path:
    keys = {"checkpoint": str(files / "z_image.safetensors")} | model
    path = folder / "config.toml"
    path.write_text(
        "[model]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        + f"""
[data]
path = "{files / "images"}"
resolution = 64
bucket_step = 32
[lora]
rank = 2
[train]
steps = 2
precision = "fp32"
[sample]
every = 2
prompts = ["a red circle"]
steps = 2
[output]
dir = "{folder / "run"}"
"""
    )
    return path


def plan(capsys: Capture, source: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    status = cli.run(["train", str(source), "--device", "cpu", "--dry-run", "--json", *options])
    out, err = capsys.readouterr()
    assert status == 0, err
    return dict(json.loads(out))


def refusal(capsys: Capture, source: Path, *options: str) -> str:
    capsys.readouterr()
    assert cli.run(["train", str(source), "--device", "cpu", "--dry-run", *options]) in (2, 3)
    return capsys.readouterr().err


def other_values(file: Path, target: Path) -> None:
    """Writes a file of the same names and shapes with other values."""
    with SafetensorsFile(file) as opened:
        save_file(target, {name: np.array(opened.read(name)) * 2 for name in opened.names})


def test_a_run_finds_its_vae_and_text_encoder_in_comfyui(
    files: Path, comfy: Path, tmp_path: Path, capsys: Capture
) -> None:
    source = config(files, tmp_path)
    told = refusal(capsys, source)
    assert "or the models folder of ComfyUI or Forge with model.search" in told
    found = {one["for"]: one for one in plan(capsys, source, "--models", str(comfy))["found"]}
    assert {key: Path(one["path"]) for key, one in found.items()} == {
        "model.vae": comfy / "vae" / "ae.safetensors",
        "text_encoders.qwen3": comfy / "text_encoders" / "qwen_3_4b.safetensors",
    }
    digest = hashlib.sha256((comfy / "vae" / "ae.safetensors").read_bytes()).hexdigest()
    assert found["model.vae"]["why"] == (
        f"the only one that fits by names and shapes, unpublished (SHA-256 {digest[:12]})"
    )
    assert cli.run(["train", str(source), "--device", "cpu", "--dry-run", "--models", str(comfy)]) == 0
    assert f"found model.vae  {comfy / 'vae' / 'ae.safetensors'}: the only one" in " ".join(
        capsys.readouterr().out.split(" " * 4)
    ).replace("   ", "  ")
    named = config(files, tmp_path, search=str(comfy))
    assert cli.run(["train", str(named), "--device", "cpu"]) == 0
    assert (
        f"--vae {found['model.vae']['path']} --qwen3 {found['text_encoders.qwen3']['path']}" in capsys.readouterr().out
    )
    by_name = [f"model.vae={found['model.vae']['path']}", f"text_encoders.qwen3={found['text_encoders.qwen3']['path']}"]
    sets = [word for setting in [*by_name, f"output.dir={tmp_path / 'named'}"] for word in ("--set", setting)]
    assert cli.run(["train", str(config(files, tmp_path)), "--device", "cpu", *sets]) == 0
    tensors = []
    for run in ("run", "named"):
        with SafetensorsFile(next((tmp_path / run).glob("*.safetensors"))) as lora:
            tensors.append({name: lora.read(name).tobytes() for name in lora.names})
    assert tensors[0] == tensors[1]


def test_images_are_drawn_with_what_is_found(files: Path, comfy: Path, tmp_path: Path, capsys: Capture) -> None:
    def drawn(name: str, *options: str) -> tuple[dict[str, Any], bytes]:
        command = ["sample", "-m", str(files / "z_image.safetensors"), "-p", "a fox", "-o", str(tmp_path / name)]
        command += ["--steps", "2", "--width", "64", "--height", "64", "--precision", "fp32", "--device", "cpu"]
        assert cli.run([*command, "--json", *options]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out), Image.open(tmp_path / name).tobytes()

    found, pixels = drawn("found.png", "--models", str(comfy))
    assert {one["for"] for one in found["found"]} == {"model.vae", "text_encoders.qwen3"}
    named = ["--vae", str(comfy / "vae/ae.safetensors"), "--qwen3", str(comfy / "text_encoders/qwen_3_4b.safetensors")]
    assert drawn("named.png", *named)[1] == pixels


def test_no_other_encoder_of_the_same_name_is_taken(files: Path, comfy: Path, tmp_path: Path, capsys: Capture) -> None:
    source, encoder = config(files, tmp_path), comfy / "text_encoders" / "qwen_3_4b.safetensors"
    with SafetensorsFile(encoder) as file:
        fewer = {name: np.array(file.read(name)) for name in file.names if "layers.0.mlp" not in name}
    encoder.unlink()
    save_file(encoder, fewer)
    said = refusal(capsys, source, "--models", str(comfy))
    assert "text_encoders.qwen3: the checkpoint holds no such network, and none of 1 file of model.search" in said
    shutil.copy(
        files / "models" / "text_encoders" / "qwen_3_4b.safetensors", comfy / "text_encoders" / "other.safetensors"
    )
    paths = [Path(one["path"]).name for one in plan(capsys, source, "--models", str(comfy))["found"]]
    assert sorted(paths) == ["ae.safetensors", "other.safetensors"]
    assert "model.search: expected a folder" in refusal(capsys, source, "--models", str(tmp_path / "none"))


def test_of_two_that_fit_a_published_one_is_taken_and_else_none(
    files: Path, comfy: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, vae = config(files, tmp_path), comfy / "vae" / "ae.safetensors"
    shutil.copy(vae, comfy / "vae" / "copy.safetensors")
    assert len(plan(capsys, source, "--models", str(comfy))["found"]) == 2
    tuned = comfy / "vae" / "a_tuned.safetensors"
    other_values(vae, tuned)
    said = refusal(capsys, source, "--models", str(comfy))
    assert "model.vae: 3 files fit by names and shapes, and differ" in said
    assert str(tuned) in said
    digest = hashlib.sha256(vae.read_bytes()).hexdigest()
    monkeypatch.setattr(found_parts, "published_parts", lambda family: ({digest: "ae.safetensors"}, frozenset()))
    (found,) = [one for one in plan(capsys, source, "--models", str(comfy))["found"] if one["for"] == "model.vae"]
    assert (found["path"], found["why"]) == (
        str(vae),
        f"the published ae.safetensors (SHA-256 {digest[:12]}); passed over {tuned}",
    )
    other = hashlib.sha256(tuned.read_bytes()).hexdigest()
    monkeypatch.setattr(found_parts, "published_parts", lambda family: ({}, frozenset({digest, other})))
    assert "is another family's" in refusal(capsys, source, "--models", str(comfy))


def test_a_published_vae_is_known_by_its_families() -> None:
    (ours, others), (of_anima, not_of_anima) = map(found_parts.published_parts, ("zimage", "anima"))
    (flux,) = [digest for digest, name in ours.items() if name == "ae.safetensors"]
    (qwen,) = of_anima
    assert (of_anima[qwen], qwen in others, flux in others) == ("qwen_image_vae.safetensors", True, False)
    assert flux in not_of_anima
