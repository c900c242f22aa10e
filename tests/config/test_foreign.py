"""A config of another trainer gets one message that names the program and `import`, on every command with --config."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame_train import cli
from flame_train.config.foreign.recognize import read_foreign
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


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("accelerate launch train_dreambooth_lora_sdxl.py --learning_rate=1e-4", "train_dreambooth_lora_sdxl.py"),
        ("export A=1\naccelerate launch \\\n  --num_processes 1 \\\n  sdxl_train.py --a b", "sdxl_train.py"),
        ("# python no.py\ndeepspeed --num_gpus=1 train.py --deepspeed --config a.toml", "train.py"),
    ],
)
def test_a_command_of_another_script_is_named(tmp_path: Path, command: str, script: str) -> None:
    """As diffusers has them, and trainers of whole models."""
    (tmp_path / "run.sh").write_text(command)
    with pytest.raises(ConfigError, match=f"got one that starts {script}; import the config that it reads"):
        read_foreign(str(tmp_path / "run.sh"))


@pytest.mark.parametrize(("name", "text"), [("a.json", "{}"), ("a.json", "{"), ("a.sh", "ls"), ("a.md", "x")])
def test_another_file_is_told_by_its_ending(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"expected a file ending in \.toml"):
        load(str(tmp_path / name))


@pytest.mark.parametrize(
    ("was", "wild", "said"),
    [
        ("steps: 2000", "steps: " + "9" * 5001, "steps: expected a number from -1e100 to 1e100"),
        ("steps: 2000", "steps: " + "9" * 900, "steps: expected a number from -1e100 to 1e100"),
        ("lr: 1e-4", "lr: .inf", "lr: expected a number"),
        ("lr: 1e-4", "lr: .nan", "lr: expected a number"),
        (
            "        - folder_path",
            "        abc\n      other:\n        - folder_path",
            "expected a table of settings, got str",
        ),
        ("        - folder_path", "        - abc\n        - folder_path", "expected a table of settings, got str"),
    ],
)
def test_an_import_of_wild_values_is_refused_by_place(tmp_path, capsys, was, wild, said):
    (tmp_path / "job.yaml").write_text(JOB.replace(was, wild, 1))
    assert cli.run(["import", str(tmp_path / "job.yaml")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("wild", ["nan", "NaN", "Infinity", "1e999", "9" * 400])
def test_a_number_written_as_text_that_no_setting_has_is_left_out_by_name(tmp_path, capsys, wild):
    job = JOB.replace("steps: 2000", f"steps: '{wild}'").replace("save_every: 250", f"save_every: '{wild}'")
    (tmp_path / "job.yaml").write_text(job)
    assert cli.run(["import", str(tmp_path / "job.yaml"), "--partial"]) == 0
    told = capsys.readouterr().out
    assert "(from train.steps): expected an integer" in told
    assert "(from save.save_every): expected an integer" in told


def test_a_command_of_very_many_options_is_refused(tmp_path, capsys):
    line = "python sdxl_train_network.py " + " ".join(f"--x{i} 1" for i in range(3000))
    (tmp_path / "job.sh").write_text(line)
    assert cli.run(["import", str(tmp_path / "job.sh")]) == 2
    assert "at most 2000 options" in capsys.readouterr().err


def test_no_line_of_a_file_that_a_config_names_is_repeated(tmp_path, capsys):
    (tmp_path / "secrets").write_text("root:SECRET:0:0\n")
    (tmp_path / "job.toml").write_text(
        'pretrained_model_name_or_path = "x"\nnetwork_module = "networks.lora"\noutput_name = "x"\n'
        f'dataset_config = "{tmp_path}/secrets"\n'
    )
    assert cli.run(["import", str(tmp_path / "job.toml")]) == 2
    said = capsys.readouterr().err
    assert "secrets: expected a config that can be read" in said
    assert "SECRET:" not in said


def test_no_name_or_origin_becomes_a_line_of_the_config(tmp_path, capsys):
    named = tmp_path / "x\n[train]\nsteps = 7\n.yaml"
    named.write_text(JOB)
    assert cli.run(["import", str(named), "-o", str(tmp_path / "my.toml")]) == 0
    assert load(str(tmp_path / "my.toml"), ["model.checkpoint=x", "data.path=x"]).train.steps == 2000
