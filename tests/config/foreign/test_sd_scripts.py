"""Commands with a config file, arguments that a model does not read, and what stays of a run's checkpoints."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from flame_train.errors import ConfigError
from flame_train.tools.import_config import import_config

BASE_TOML = """\
[model_arguments]
pretrained_model_name_or_path = "/m/base.safetensors"
[network]
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
[training]
learning_rate = 1e-4
max_train_epochs = 8
resolution = "768"
enable_bucket = true
train_batch_size = 3
"""

PLAIN = """\
pretrained_model_name_or_path = "/m.safetensors"
train_data_dir = "/d"
output_dir = "/o"
enable_bucket = true
network_module = "networks.lora"
"""


def of_command(tmp_path: Path, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    (tmp_path / "run.sh").write_text(f"#!/bin/sh\naccelerate launch {command}\n")
    result = import_config(str(tmp_path / "run.sh"), tmp_path / "ours.toml", force=True)
    return {path: each["value"] for path, each in result["carried"].items()}, result


def of_toml(tmp_path: Path, more: str, family: str = "sdxl", partial: bool = False) -> dict[str, Any]:
    (tmp_path / "theirs.toml").write_text(PLAIN + more)
    return import_config(str(tmp_path / "theirs.toml"), tmp_path / "ours.toml", family, force=True, partial=partial)


def values(result: dict[str, Any]) -> dict[str, Any]:
    return {path: each["value"] for path, each in result["carried"].items()}


@pytest.mark.parametrize("named", ["base.toml", "base", "configs/base.toml"])
def test_a_command_reads_its_config_file_and_overrides_it(tmp_path: Path, named: str) -> None:
    """train_util.py:4700: the ending may be left out, sections mean nothing, arguments win."""
    place = tmp_path / (named if named.endswith(".toml") else f"{named}.toml")
    place.parent.mkdir(exist_ok=True)
    place.write_text(BASE_TOML)
    found, result = of_command(
        tmp_path,
        f"sdxl_train_network.py --config_file={named} --learning_rate 2e-4 --train_data_dir /d --output_dir=/o",
    )
    expected = {
        "model.checkpoint": "/m/base.safetensors",
        "lora.rank": 32,
        "lora.alpha": 16.0,
        "optimizer.lr": 2e-4,
        "train.epochs": 8,
        "data.resolution": 768,
        "data.batch_size": 3,
        "data.path": "/d",
    }
    assert {path: found.get(path) for path in expected} == expected
    assert result["listed"] == []


def test_a_config_file_that_is_not_there_stops_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.sh:2: config_file = 'base\.toml': expected the file beside this one"):
        of_command(tmp_path, "sdxl_train_network.py --config_file base --train_data_dir /d --output_dir /o")


def test_animas_script_is_one_of_ours(tmp_path: Path) -> None:
    command = (
        "anima_train_network.py --pretrained_model_name_or_path /a.safetensors --qwen3 /q.safetensors "
        "--vae /v.safetensors --network_module networks.lora_anima --network_dim 8 --network_train_unet_only "
        "--train_data_dir /d --output_dir /o --enable_bucket --timestep_sampling shift --discrete_flow_shift 3 "
        "--weighting_scheme sigma_sqrt"
    )
    found, result = of_command(tmp_path, command)
    assert result["family"] == "anima"
    expected = {
        "model.checkpoint": "/a.safetensors",
        "model.vae": "/v.safetensors",
        "text_encoders.qwen3": "/q.safetensors",
        "lora.targets": ["attention+mlp"],
        "loss.timestep_sampling": "sigmoid",
        "loss.shift": 3.0,
        "loss.weighting": "sigma_sqrt",
    }
    assert {path: found.get(path) for path in expected} == expected


@pytest.mark.parametrize(
    ("more", "family", "names"),
    [
        ("model_prediction_type = 'raw'\nmin_snr_gamma = 5\nnoise_offset = 0.1\nmin_timestep = 100", "flux", 3),
        ("debiased_estimation_loss = true\nmultires_noise_iterations = 6\nip_noise_gamma = 0.1", "sd3", 3),
    ],
)
def test_what_a_model_of_flow_does_not_read_is_listed(tmp_path: Path, more: str, family: str, names: int) -> None:
    """flux_train_network.py:436, sd3_train_network.py:395: the loss is returned as it is."""
    result = of_toml(tmp_path, more, family)
    unread = [
        line for line in result["listed"] if f"does not use it for {'Flux' if family == 'flux' else 'SD3'}" in line
    ]
    assert len(unread) == names
    assert not {"loss.weighting", "loss.offset_noise", "loss.pyramid_noise", "loss.min_timestep"} & set(values(result))


@pytest.mark.parametrize(
    ("more", "keep"),
    [
        ("save_every_n_epochs = 1", 0),
        ("save_every_n_steps = 100", 0),
        ("save_every_n_epochs = 2\nsave_last_n_epochs = 4", 4),
        ("save_every_n_steps = 10\nsave_last_n_steps = 30", 4),
        ("save_every_n_steps = 400\nsave_last_n_steps = 3", 1),
        ("save_n_epoch_ratio = 4\nmax_train_epochs = 12", 0),
        ("", None),
    ],
)
def test_checkpoints_that_stay(tmp_path: Path, more: str, keep: int | None) -> None:
    """train_util.py:5786: of epochs so many stay, of steps those of a span."""
    assert values(of_toml(tmp_path, more)).get("checkpoint.keep") == keep


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            'optimizer_type = "Adafactor"',
            {"optimizer.relative_step": True, "optimizer.scale_parameter": True, "optimizer.lr": 1.0},
        ),
        (
            'optimizer_type = "SGDNesterov"',
            {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.weight_decay": 0.0},
        ),
        ('optimizer_type = "PagedAdamW32bit"', {"optimizer.name": "adamw"}),
        (
            'optimizer_type = "AdamWScheduleFree"\nlr_scheduler = "cosine"\nlr_warmup_steps = 9',
            {"schedule.name": "constant"},
        ),
        (
            'lr_scheduler = "cosine_with_min_lr"\nlr_scheduler_min_lr_ratio = 0.1\nlearning_rate = 1e-3',
            {"schedule.min_lr": 1e-4},
        ),
        ("network_alpha = 0\nnetwork_dim = 8", {"lora.alpha": 8.0}),
        ("caption_extention = '.cap'", {"data.caption_extension": ".cap"}),
        ("base_weights = ['/a.safetensors']", {"model.training_adapter": "/a.safetensors"}),
        ("log_with = 'wandb'", {"output.wandb": "network_train"}),
        ("bucket_no_upscale = true", {"data.min_bucket": None, "data.max_bucket": None}),
        ("sample_prompts = 'p.txt'", {"sample.prompt_file": "p.txt", "sample.every": 0, "sample.first": False}),
        ("sample_prompts = 'p.txt'\nsample_at_first = true", {"sample.first": True}),
        ("sample_at_first = false", {"sample.first": None}),
    ],
)
def test_values_as_the_program_means_them(tmp_path: Path, more: str, expected: dict[str, Any]) -> None:
    found = values(of_toml(tmp_path, more))
    assert {path: found.get(path) for path in expected} == expected


def test_what_changes_nothing_has_no_line(tmp_path: Path) -> None:
    quiet = (
        'epoch = 3\nnoise_offset_type = "Original"\nclip_skip = 1\nsave_state = true\nresume = ""\n'
        'wandb_run_name = "x"\n'
        'optimizer_type = "Prodigy"\noptimizer_args = ["decouple=True", "d_coef=0.8"]\nv2 = false\n'
    )
    result = of_toml(tmp_path, quiet)
    assert result["listed"] == []
    assert {"epoch", "noise_offset_type", "optimizer_args.decouple", "save_state"} <= set(result["needless"])


def test_what_is_lost_says_what_to_do(tmp_path: Path) -> None:
    result = of_toml(tmp_path, 'resume = "/state"\ntraining_comment = "my fox"\nmax_train_steps = 0\n', partial=True)
    first, *others = result["listed"]
    assert "max_train_steps = 0: no steps are no training; set train.steps or train.epochs" in first
    assert any("resume = '/state'" in line and "lora.from" in line for line in others)
    assert any("training_comment = 'my fox'" in line and "output.title" in line for line in others)


def test_the_result_says_nothing_twice(tmp_path: Path) -> None:
    """Two folders share what the config says of all images."""
    more = 'reg_data_dir = "/r"\nprior_loss_weight = 0.5\ntrain_batch_size = 2\nshuffle_caption = true\n'
    of_toml(tmp_path, more)
    tree = tomllib.loads((tmp_path / "ours.toml").read_text())
    assert tree["data"]["sets"] == [
        {"path": "/d"},
        {"path": "/r", "regularization": True, "regularization_weight": 0.5},
    ]
    assert (tree["data"]["batch_size"], tree["data"]["folder_repeats"], tree["captions"]["shuffle"]) == (2, True, True)


def test_the_box_of_sdxl_names_the_family(tmp_path: Path) -> None:
    result = of_toml(tmp_path, "sdxl = true\n", family="")
    assert (result["family"], result["listed"]) == ("sdxl", of_toml(tmp_path, "")["listed"])
