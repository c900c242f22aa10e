"""A config of another trainer gets one message that names the program and `import`, on every command with --config."""

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


COMMAND = "accelerate launch sdxl_train_network.py --network_dim 8\n"
PRESET = '{"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "x"}'


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("train.yaml", JOB, "ai-toolkit"),
        ("train.yaml", FLAT, "EriDiffusion"),
        ("paths.yaml", SD35, "EriDiffusion"),
        ("kohya.toml", 'network_module = "networks.lora"\nnetwork_dim = 8\n', "sd-scripts"),
        ("guide.toml", "[training_arguments]\nmax_train_steps = 3\n", "sd-scripts"),
        ("set.toml", "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'x'\n", "sd-scripts"),
        ("run.sh", COMMAND, "sd-scripts"),
        ("preset.json", PRESET, "OneTrainer"),
        ("config.json", '{"--model_family": "sdxl", "--data_backend_config": "b.json"}', "SimpleTuner"),
        ("pipe.toml", "dataset = 'd.toml'\n[model]\ntype = 'flux'\n[adapter]\nrank = 3\n", "diffusion-pipe"),
    ],
)
@pytest.mark.parametrize("command", [["train", "--dry-run"], ["cache"], ["sdxl-lora", "--dry-run"]])
def test_one_message_names_the_program_and_the_command(
    tmp_path: Path, name: str, text: str, program: str, command: list[str], capsys
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert cli.run([*command, "--config", str(path)]) == 2
    told = capsys.readouterr().err
    assert f"got one of {program}; `flame-train import {path} -o my.toml`" in told
    assert "docs/conventions.md" in told
    assert len(told.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["lora: {rank: 3}\nmodel_kind: sdxl\n", "job: extension\n", "config: {process: []}\n"])
def test_a_single_key_of_theirs_is_an_unknown_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="unknown"):
        load(str(path))


@pytest.mark.parametrize(("name", "text"), [("a.json", "{}"), ("a.json", "{"), ("a.sh", "ls"), ("a.md", "x")])
def test_another_file_is_told_by_its_ending(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"expected a file ending in \.toml"):
        load(str(tmp_path / name))
