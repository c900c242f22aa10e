"""A config of EriDiffusion or ai-toolkit gets one message that says what it is, on every command with --config."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame_train import cli
from flame_train.config.load import load
from flame_train.errors import ConfigError

JOB = """\
job: extension
config:
  name: "my_lora"
  process:
    - type: 'sd_trainer'
      training_folder: "output"
      device: cuda:0
      trigger_word: "ohwx"
      network: {type: lora, linear: 16, linear_alpha: 16}
      save: {dtype: float16, save_every: 250, max_step_saves_to_keep: 4}
      datasets:
        - folder_path: "images"
          caption_ext: "txt"
          resolution: [512, 768, 1024]
      train:
        batch_size: 1
        steps: 2000
        noise_scheduler: "flowmatch"
        optimizer: "adamw8bit"
        lr: 1e-4
        ema_config: {use_ema: true, ema_decay: 0.99}
      model: {name_or_path: "black-forest-labs/FLUX.1-dev", is_flux: true, quantize: true}
      sample:
        prompts: ["[trigger] on a beach"]
meta:
  name: "[name]"
  version: '1.0'
"""
FLAT = """\
model_kind: sdxl
weights: /models/sdxl.safetensors
bf16_params: true
steps: 1000
batch_size: 1
grad_accum_steps: 1
lr: 0.0001
optimizer: adamw
sdxl_unet_path: /models/unet.safetensors
"""
SD35 = "model_kind: sd3\nsd35_model_path: /models/sd35.safetensors\nsd35_vae_path: /models/vae.safetensors\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [(JOB, "a job of EriDiffusion or ai-toolkit"), (FLAT, "EriDiffusion's flat configs"), (SD35, "flat configs")],
    ids=["job", "flat", "flat, paths alone"],
)
@pytest.mark.parametrize("command", [["train", "--dry-run"], ["cache"], ["sdxl-lora", "--dry-run"]])
def test_one_message_says_what_it_is(tmp_path: Path, text: str, what: str, command: list[str], capsys) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    assert cli.run([*command, "--config", str(path)]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert "docs/migration/eridiffusion.md" in told
    assert len(told.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["model_kind: sdxl\n", "job: extension\n", "config: {process: []}\n"])
def test_a_single_key_of_theirs_is_an_unknown_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="unknown"):
        load(str(path))
