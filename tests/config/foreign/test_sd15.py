"""Configs of Stable Diffusion 1.5 and 2.1: the family is told, and what SDXL has otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flame_train.tools.import_config import import_config

LAYERS = ["attention+mlp", "*.proj_in", "*.proj_out"]
SD_SCRIPTS = (
    "accelerate launch train_network.py --pretrained_model_name_or_path=/m.safetensors --train_data_dir=/d "
    "--output_dir=/o --resolution=512 --network_module=networks.lora --network_dim=16 --network_alpha=1 "
    "--learning_rate=1e-4 --text_encoder_lr=1e-5 --clip_skip=2 --v2 --v_parameterization --min_snr_gamma=5 "
    "--noise_offset=0.05 --max_train_steps=100\n"
)
AI_TOOLKIT = """
job: extension
config:
  name: fox
  process:
  - type: sd_trainer
    training_folder: /o
    network: {type: lora, linear: 16, linear_alpha: 16}
    datasets: [{folder_path: /d, resolution: [512]}]
    train: {batch_size: 1, steps: 100, lr: 1e-4, train_text_encoder: true, noise_scheduler: ddpm}
    model: {name_or_path: /m.safetensors, is_v2: true, is_v_pred: true}
"""
ONETRAINER = {
    **{"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "base_model_name": "/m.safetensors"},
    **{"optimizer": {"optimizer": "ADAMW"}, "learning_rate": 0.0003, "lora_rank": 16, "lora_alpha": 1.0},
    **{"text_encoder": {"train": True, "dropout_probability": 0.1}, "text_encoder_layer_skip": 1},
    **{"unet": {"learning_rate": 0.0002}, "resolution": "512", "concepts": [{"path": "/d"}]},
}
SIMPLETUNER = {
    **{"model_family": "sd1x", "model_type": "lora", "model_flavour": "1.5", "data_backend_config": "b.json"},
    **{"max_train_steps": 100, "learning_rate": 1e-4, "offset_noise": True, "noise_offset": 0.05},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "run.sh",
        SD_SCRIPTS,
        {
            "model.prediction": "v",
            "text_encoders.clip_skip": 2,
            "text_encoders.train": ["clip"],
            "text_encoders.lr": 1e-5,
            "lora.targets": LAYERS,
            "loss.snr_gamma": 5.0,
            "loss.offset_noise": 0.05,
            "data.resolution": 512,
        },
    ),
    (
        "job.yaml",
        AI_TOOLKIT,
        {"model.prediction": "v", "text_encoders.train": ["clip"], "lora.targets": LAYERS, "data.resolution": 512},
    ),
    (
        "preset.json",
        json.dumps(ONETRAINER),
        {
            "text_encoders.clip_skip": 2,
            "text_encoders.train": ["clip"],
            "text_encoders.clip_dropout": 0.1,
            "optimizer.lr": 0.0002,
            "lora.rank": 16,
            "data.resolution": 512,
        },
    ),
    (
        "velocity.json",
        json.dumps(
            ONETRAINER | {"model_type": "STABLE_DIFFUSION_21", "rescale_noise_scheduler_to_zero_terminal_snr": True}
        ),
        {"model.prediction": "v", "loss.zero_terminal_snr": True, "text_encoders.clip_skip": 2},
    ),
    (
        "noise.json",
        json.dumps(ONETRAINER | {"model_type": "STABLE_DIFFUSION_21_BASE"}),
        {"model.prediction": None},
    ),
    (
        "forced.json",
        json.dumps(ONETRAINER | {"model_type": "STABLE_DIFFUSION_20", "force_epsilon_prediction": True}),
        {"model.prediction": "epsilon"},
    ),
    (
        "simple.json",
        json.dumps(SIMPLETUNER),
        {"model.checkpoint": "hf:stable-diffusion-v1-5/stable-diffusion-v1-5", "loss.offset_noise": 0.05},
    ),
    (  # simpletuner/helpers/models/sd1x/model.py: what it predicts, and that its noise ends in noise alone
        "second.json",
        json.dumps(SIMPLETUNER | {"model_family": "sd2x", "model_flavour": "2.1"}),
        {"model.prediction": "v", "loss.zero_terminal_snr": True},
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=[name for name, _, _ in CASES])
def test_a_config_is_carried_over(tmp_path: Path, name: str, text: str, expected: dict[str, Any]) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "b.json").write_text(json.dumps([{"id": "a", "type": "local", "instance_data_dir": "/d"}]))
    found = import_config(str(tmp_path / name), None, partial=True)
    assert found["family"] == "sd15"
    values = {path: each["value"] for path, each in found["carried"].items()}
    assert {path: values.get(path) for path in expected} == expected


@pytest.mark.parametrize(("theirs", "remark"), [("ddpm", "the nearest to ddpm here"), ("k_euler", "")])
def test_a_sampler_that_is_another_is_told(tmp_path: Path, theirs: str, remark: str) -> None:
    (tmp_path / "run.sh").write_text(f"{SD_SCRIPTS.strip()} --sample_sampler={theirs} --sample_every_n_steps=5\n")
    carried = import_config(str(tmp_path / "run.sh"), None, partial=True)["carried"]
    assert carried["sample.sampler"]["value"] == "euler"
    assert carried["sample.sampler"]["from"] == "; ".join(filter(None, ("sample_sampler", remark)))
