"""Regularization images come as often as sd-scripts repeats them (train_util.py:2172, DreamBoothDataset)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flame_train.tools.import_config import import_config

COMMAND = "accelerate launch sdxl_train_network.py --pretrained_model_name_or_path /m.safetensors --output_dir o \
--network_module networks.lora --train_data_dir dogs --reg_data_dir general"
BOXES = {
    "LoRA_type": "Standard",
    "sdxl": True,
    "pretrained_model_name_or_path": "/m.safetensors",
    "output_dir": "o",
    "train_data_dir": "dogs",
    "reg_data_dir": "general",
    "max_resolution": "512,512",
    "epoch": 2,
}
TABLES = """\
[[datasets]]
  [[datasets.subsets]]
  image_dir = "dogs/4_a dog"
  num_repeats = 3
  [[datasets.subsets]]
  image_dir = "general/2_dog"
  is_reg = true
[[datasets]]
  [[datasets.subsets]]
  image_dir = "dogs/1_a"
"""


def shown_there(images: int, regular: int, repeats: int) -> int:
    """How many of regularization there are in an epoch: the loop of sd-scripts."""
    shown, first = 0, True
    while shown < images:
        for _ in range(regular):
            shown += repeats if first else 1
            if shown >= images:
                break
        first = False
    return shown


def folders(place: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        (place / name).mkdir(parents=True)
        (place / name / "0.txt").touch()
        for i in range(count):
            (place / name / f"{i}.png").touch()


def imported(place: Path, kind: str) -> dict[str, Any]:
    file, text = {
        "command": ("run.sh", COMMAND),
        "boxes": ("gui.json", json.dumps(BOXES)),
        "tables": ("sets.toml", TABLES),
    }[kind]
    (place / file).write_text(text)
    return import_config(str(place / file), None, "sdxl")


@pytest.mark.parametrize("kind", ["command", "boxes"])
@pytest.mark.parametrize("regular", [3, 20])
def test_they_come_as_often_as_images_of_training(tmp_path: Path, kind: str, regular: int) -> None:
    folders(tmp_path, {"dogs/4_a dog": 5, "dogs/1_a": 4, "dogs/no number": 7, "general/2_dog": regular})
    result = imported(tmp_path, kind)
    images, own = result["sets"]
    assert own["regularization"]
    assert "weight" not in images
    assert own["weight"] * 2 * regular == pytest.approx(shown_there(24, regular, 2), abs=1e-3)
    assert not any("regularization" in line or "reg_data_dir" in line for line in result["listed"])


def test_tables_count_within_their_dataset(tmp_path: Path) -> None:
    folders(tmp_path, {"dogs/4_a dog": 5, "dogs/1_a": 4, "general/2_dog": 2})
    assert [one.get("weight") for one in imported(tmp_path, "tables")["sets"]] == [None, 7.5, None]


def test_as_many_need_no_weight(tmp_path: Path) -> None:
    folders(tmp_path, {"dogs/4_a dog": 2, "general/1_dog": 8})
    assert "weight" not in imported(tmp_path, "command")["sets"][1]


@pytest.mark.parametrize("kind", ["command", "boxes", "tables"])
def test_folders_elsewhere_are_told(tmp_path: Path, kind: str) -> None:
    result = imported(tmp_path, kind)
    assert not any("weight" in one for one in result["sets"])
    (said,) = [line for line in result["listed"] if "set the set's weight to training images" in line]
    assert "general" in said
