"""What kohya's web interface saves becomes what it would have told sd-scripts (bmaltais/kohya_ss, lora_gui.py:2147)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flame_train.config.foreign.kohya_gui import KINDS, interface_boxes
from flame_train.config.load import load
from flame_train.errors import ConfigError
from flame_train.tools.import_config import import_config

FOX: dict[str, Any] = {
    "LoRA_type": "LyCORIS/LoKr",
    "optimizer": "Prodigy",
    "learning_rate": 1.0,
    "unet_lr": 1.0,
    "max_resolution": "768,768",
    "epoch": 12,
    "max_train_steps": 0,
    "lr_warmup": 10,
    "network_dim": 16,
    "network_alpha": 8,
    "conv_dim": 8,
    "factor": 8,
    "sdxl": True,
    "caption_extension": "",
    "additional_parameters": "--min_timestep 100",
    "sample_prompts": "zkfox on a rock --w 832 --h 1216\nzkfox in rain",
    "pretrained_model_name_or_path": "/m/sdxl.safetensors",
    "train_data_dir": "/d",
    "output_dir": "/o",
    "output_name": "fox",
}


def imported(tmp_path: Path, boxes: dict[str, Any], family: str = "", partial: bool = False) -> dict[str, Any]:
    (tmp_path / "gui.json").write_text(json.dumps(boxes, indent=1))
    (tmp_path / "ours.toml").unlink(missing_ok=True)
    result = import_config(str(tmp_path / "gui.json"), tmp_path / "ours.toml", family, partial=partial)
    load(str(tmp_path / "ours.toml"))
    return result


def values(result: dict[str, Any]) -> dict[str, Any]:
    return {path: each["value"] for path, each in result["carried"].items()}


def test_a_recipe_stays_the_recipe(tmp_path: Path) -> None:
    result = imported(tmp_path, FOX)
    assert (result["from"], result["family"], result["listed"]) == ("kohya's GUI", "sdxl", [])
    expected = {
        "optimizer.name": "prodigy",
        "optimizer.lr": 1.0,
        "lora.kind": "lokr",
        "lora.factor": 8,
        "lora.rank": 16,
        "lora.alpha": 8.0,
        "data.resolution": 768,
        "data.caption_extension": ".caption",
        "train.epochs": 12,
        "schedule.name": "cosine",
        "schedule.warmup": 0.1,
        "loss.min_timestep": 100,
        "sample.prompts": ["zkfox on a rock --w 832 --h 1216", "zkfox in rain"],
        "sample.every": 0,
        "checkpoint.every_epochs": 1,
        "checkpoint.keep": 0,
    }
    found = values(result)
    assert {path: found.get(path) for path in expected} == expected
    assert "sample.prompt_file" not in found
    (rule,) = found["lora.rules"]
    assert (rule["rank"], rule["alpha"]) == (8, 1.0)


def test_a_box_at_its_default_has_no_line(tmp_path: Path) -> None:
    off = (
        "full_bf16",
        "block_dims",
        "noise_offset",
        "resume",
        "huggingface_repo_id",
        "train_inpainting",
        "vae_batch_size",
    )
    usual = (
        {name: value for name, value in interface_boxes().at_default.items() if name not in FOX}
        | dict.fromkeys(off, "")
        | {"resume": None}
    )
    result = imported(tmp_path, FOX | usual)
    assert result["listed"] == []
    assert values(result) == values(imported(tmp_path, FOX))
    assert set(usual) <= set(result["needless"])


def test_every_box_is_somewhere(tmp_path: Path) -> None:
    """A box is carried over, listed, or among those that need no key; none vanishes."""
    boxes = FOX | {"noise_offset": 0.1, "noise_offset_type": "Multires", "max_train_steps": 90, "ae": "/a", "unit": 4}
    boxes |= {"seed": 3, "additional_parameters": "--seed 4", "lr_warmup_steps": 5, "color_aug": True, "quantum": 7}
    result = imported(tmp_path, boxes)
    made = {name for each in result["carried"].values() for name in each["settings"]}
    listed = {name for name in boxes if any(f" {name} = " in line for line in result["listed"])}
    assert listed == {"color_aug", "quantum"}
    of_sets = {"train_data_dir", "max_resolution", "caption_extension"}
    assert set(boxes) - made - listed - set(result["needless"]) - of_sets == {"additional_parameters"}
    assert values(result)["train.seed"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_carried_or_stops_the_import(tmp_path: Path, kind: str) -> None:
    boxes = FOX | {"LoRA_type": kind, "conv_dim": 4, "conv_alpha": 2, "caption_extension": ".txt"}
    boxes |= {"sdxl": False, "flux1_checkbox": True} if "Flux" in kind else {}
    boxes |= {"sdxl": False, "anima_checkbox": True} if kind == "Anima" else {}
    here = {
        "Standard": "lora",
        "Kohya LoCon": "locon",
        "Kohya LoHa": "loha",
        "Kohya LoKr": "lokr",
        "Flux1": "lora",
        "Anima": "lora",
        "LoCon": "locon",
        "LyCORIS/LoCon": "locon",
        "LyCORIS/LoHa": "loha",
        "LyCORIS/LoKr": "lokr",
    }
    if kind in here:
        found = values(imported(tmp_path, boxes))
        assert found.get("lora.kind", "lora") == here[kind]
        if here[kind] == "locon":
            assert (found["lora.conv_rank"], found["lora.conv_alpha"]) == (4, 2.0)
    else:
        with pytest.raises(ConfigError) as caught:
            imported(tmp_path, boxes)
        assert f"LoRA_type = {kind!r}" in str(caught.value).splitlines()[1]
        assert imported(tmp_path, boxes, partial=True)["listed"][0] in str(caught.value)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ({"max_train_steps": 500}, {"train.steps": 500, "train.epochs": None}),
        ({"max_train_epochs": 3, "max_train_steps": 500}, {"train.epochs": 3, "train.steps": None}),
        ({"lr_warmup_steps": 20}, {"schedule.warmup_steps": 20, "schedule.warmup": None}),
        ({"noise_offset": 0.1, "noise_offset_type": "Multires"}, {"loss.offset_noise": None}),
        ({"noise_offset": 0.1}, {"loss.offset_noise": 0.1}),
        ({"text_encoder_lr": 0}, {"text_encoders.train": None}),
        ({"text_encoder_lr": 0.5}, {"text_encoders.train": ["clip_l", "clip_g"], "text_encoders.lr": 0.5}),
        ({"seed": ""}, {"train.seed": None}),
        ({"seed": "7"}, {"train.seed": 7}),
        ({"additional_parameters": "--optimizer_type=Lion --seed 9"}, {"optimizer.name": "lion", "train.seed": 9}),
        ({"optimizer_args": '"d_coef=0.5" "decouple=True"'}, {"optimizer.d_coef": 0.5}),
        ({"lr_warmup": "ten"}, {"schedule.warmup": None, "optimizer.name": "prodigy"}),
        ({"lr_warmup": None, "LoRA_type": None}, {"schedule.warmup": 0.1, "lora.kind": None}),
        ({"max_resolution": "", "epoch": ""}, {"data.resolution": 512, "train.epochs": 1}),
        ({"network_dim": 100000}, {"lora.full_matrix": True, "lora.rank": None}),
        ({"save_last_n_epochs": 2}, {"checkpoint.keep": 2}),
        ({"LoRA_type": "Standard", "LyCORIS_preset": "attn-only"}, {"lora.kind": None, "lora.factor": None}),
        ({"dora_wd": True, "LoRA_type": "LyCORIS/LoCon"}, {"lora.kind": "dora", "lora.wd_on_output": True}),
    ],
)
def test_boxes_mean_what_the_interface_makes_of_them(
    tmp_path: Path, boxes: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = values(imported(tmp_path, FOX | boxes))
    assert {path: found.get(path) for path in expected} == expected


@pytest.mark.parametrize(
    ("boxes", "family"),
    [
        ({"flux1_checkbox": True, "LoRA_type": "Flux1"}, "flux"),
        ({"flux1_checkbox": True, "LoRA_type": "Flux1", "model_type": "chroma"}, "chroma"),
        ({"sd3_checkbox": True, "LoRA_type": "Standard"}, "sd3"),
        ({"anima_checkbox": True, "LoRA_type": "Anima"}, "anima"),
    ],
)
def test_the_ticked_box_says_the_family(tmp_path: Path, boxes: dict[str, Any], family: str) -> None:
    plain = {name: value for name, value in FOX.items() if name != "additional_parameters"}
    result = imported(tmp_path, plain | {"sdxl": False, "min_snr_gamma": 5, "noise_offset": 0.1} | boxes)
    assert result["family"] == family
    assert not {"loss.weighting", "loss.offset_noise"} & set(values(result))
    for name in ("min_snr_gamma", "noise_offset"):
        assert any(name in line and "sd-scripts does not use it" in line for line in result["listed"])


def test_two_encoders_of_flux_have_their_rates(tmp_path: Path) -> None:
    boxes = {"sdxl": False, "flux1_checkbox": True, "LoRA_type": "Flux1", "additional_parameters": ""}
    rates = {"text_encoder_lr": 2e-5, "t5xxl_lr": 1e-5, "train_t5xxl": True}
    found = values(imported(tmp_path, FOX | boxes | rates))
    assert (found["text_encoders.train"], found["text_encoders.lr"]) == (["clip_l", "t5"], 2e-5)
    assert {"match": ["t5.*"], "lr": 1e-5} in found["lora.rules"]


def test_no_ticked_box_is_an_older_model(tmp_path: Path) -> None:
    for older in ({}, {"v2": True, "v_parameterization": True}):
        found = imported(tmp_path, FOX | {"sdxl": False, "clip_skip": 2} | older)
        assert found["family"] == "sd15"
        assert ("clip_skip = 2" in found["config"], 'prediction = "v"' in found["config"]) == (True, bool(older))
    assert imported(tmp_path, FOX | {"sdxl": False}, "sdxl")["family"] == "sdxl"


def test_no_default_is_of_both_kinds() -> None:
    assert not set(interface_boxes().at_default) & set(interface_boxes().defaults)


def test_what_is_carried_over_is_not_needless(tmp_path: Path) -> None:
    """Also where it is the default of a program that is carried over; what several folders lack is told once."""
    more = {"network_alpha": 1, "bucket_no_upscale": False, "train_data_dir": "/d", "reg_data_dir": "/r"}
    result = imported(tmp_path, {**FOX, **more, "LoRA_type": "Standard"})
    named = [line.partition("# ")[2].partition(" ")[0] for line in result["config"].splitlines() if " = " in line]
    assert not {name.strip(";,") for name in named} & set(result["needless"])
    assert len(result["listed"]) == len(set(result["listed"]))
