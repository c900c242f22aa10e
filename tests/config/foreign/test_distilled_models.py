"""Settings of other trainers about distilled models: training adapters, guidance, and the model that draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.foreign.test_meaning import imported, job, tuner

OSTRIS = "hf:ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter"
SCHNELL = "hf:ostris/FLUX.1-schnell-training-adapter/pytorch_lora_weights.safetensors"
MUSUBI = (
    "accelerate launch src/musubi_tuner/krea2_train_network.py --dit raw.safetensors --vae v --text_encoder t "
    "--dataset_config d.toml --network_module networks.lora_krea2 --network_dim 8 --output_dir o "
)
SETS = '[[datasets]]\nimage_directory = "images"\nresolution = 512\n'


def turbo(**settings: Any) -> dict[str, str]:
    """SimpleTuner's files for the model that it trains of Z-Image where nothing is said."""
    return tuner(model_family="z_image", **settings)


@pytest.mark.parametrize(
    ("files", "adapter"),
    [
        (turbo(), f"{OSTRIS}_v2.safetensors"),
        (turbo(model_flavour="turbo"), f"{OSTRIS}_v1.safetensors"),
        (turbo(assistant_lora_weight_name="own.safetensors"), f"{OSTRIS.rpartition('/')[0]}/own.safetensors"),
        (turbo(assistant_lora_path="me/own", assistant_lora_weight_name="a.safetensors"), "hf:me/own/a.safetensors"),
        (turbo(assistant_lora_path="/a.safetensors", assistant_lora_weight_name="b.safetensors"), "/a.safetensors"),
        (turbo(assistant_lora_path="/a.safetensors", disable_assistant_lora=True), None),
        (turbo(model_flavour="base"), None),
        (tuner(model_flavour="schnell"), SCHNELL),
        (tuner(model_flavour="dev"), None),
        ({"j.yaml": job(model="arch: flux, assistant_lora_path: ostris/FLUX.1-schnell-training-adapter")}, SCHNELL),
        ({"j.yaml": job(model="arch: flux, assistant_lora_path: me/own")}, "hf:me/own"),
    ],
)
def test_an_adapter_is_the_file_that_the_other_trainer_adds(
    tmp_path: Path, files: dict[str, str], adapter: str | None
) -> None:
    """Named by a repository, by a repository and its file, or by nothing."""
    result = imported(tmp_path, files)
    assert result["values"].get("model.training_adapter") == adapter
    assert not [line for line in result["listed"] if "assistant" in line]


@pytest.mark.parametrize(
    ("factor", "strength", "listed"), [("0.5", 0.5, False), ("0", None, False), ("-1", None, True), ("3", None, True)]
)
def test_base_weights_beyond_what_an_adapter_may_be_are_not_taken_at_1(
    tmp_path: Path, factor: str, strength: float | None, listed: bool
) -> None:
    command = f"{MUSUBI} --base_weights a.safetensors --base_weights_multiplier {factor}"
    result = imported(tmp_path, {"run.sh": command, "d.toml": SETS}, partial=True)
    assert result["values"].get("model.training_adapter_strength") == strength
    assert ("model.training_adapter" in result["values"]) == (strength is not None)
    assert bool([line for line in result["listed"] if "flame-train merge" in line]) == listed


def test_musubi_tuner_draws_with_turbo(tmp_path: Path) -> None:
    result = imported(tmp_path, {"run.sh": f"{MUSUBI} --turbo_dit turbo.safetensors", "d.toml": SETS}, partial=True)
    assert result["values"]["sample.model"].endswith("turbo.safetensors")


@pytest.mark.parametrize(
    ("given", "scale", "said"),
    [
        ("do_guidance_loss: true, guidance_loss_target: [4, 2], unconditional_prompt: ''", [2.0, 4.0], ""),
        ("do_guidance_loss: true, unconditional_prompt: bad", 3.0, "an empty caption"),
        ("do_guidance_loss: false, unconditional_prompt: bad", None, ""),
        ("do_differential_guidance: true", None, "a larger optimizer.lr"),
    ],
)
def test_guidance_of_ai_toolkit(tmp_path: Path, given: str, scale: Any, said: str) -> None:
    """A range in any order; what stands for no prompt; and the reason for what is not carried is its own."""
    result = imported(tmp_path, {"j.yaml": job(f", {given}")})
    assert result["values"].get("loss.contrastive_scale") == scale
    lines = [line for line in result["listed"] if "guidance" in line or "unconditional" in line]
    assert bool(lines) == bool(said)
    assert all(said in line for line in lines)


def test_flux_2_of_simpletuner_is_told_1_whatever_the_config_says(tmp_path: Path) -> None:
    files = tuner(model_family="flux2", flux_guidance_mode="constant", flux_guidance_value=3.5, tokenizer_max_length=77)
    result = imported(tmp_path, files)
    assert "loss.guidance_scale" not in result["values"]
    assert not [line for line in result["listed"] if "guidance" in line or "tokenizer" in line]
