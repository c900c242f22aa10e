"""The text encoders that sd-scripts and diffusion-pipe train, as their scripts decide it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flame_train.tools.import_config import import_config

SDXL = """\
pretrained_model_name_or_path = "/m.safetensors"
train_data_dir = "/d"
output_name = "x"
network_module = "networks.lora"
learning_rate = 1e-4
"""


def sd_scripts(tmp_path: Path, more: str, family: str = "sdxl") -> dict[str, Any]:
    """The section [text_encoders] of what is written."""

    (tmp_path / "theirs.toml").write_text(SDXL + more)
    import_config(str(tmp_path / "theirs.toml"), tmp_path / "ours.toml", family)
    found: dict[str, Any] = tomllib.loads((tmp_path / "ours.toml").read_text()).get("text_encoders", {})
    return found


@pytest.mark.parametrize(
    ("more", "family", "train", "lr"),
    [
        ("", "sdxl", ["clip_l", "clip_g"], None),
        ("network_train_unet_only = true", "sdxl", None, None),
        ("text_encoder_lr = 0", "sdxl", None, None),
        ("text_encoder_lr = 5e-5", "sdxl", ["clip_l", "clip_g"], 5e-5),
        ("text_encoder_lr = [5e-5]", "sdxl", ["clip_l", "clip_g"], 5e-5),
        ("text_encoder_lr = [0, 2e-5]", "sdxl", ["clip_g"], 2e-5),
        ("unet_lr = 3e-4", "sdxl", ["clip_l", "clip_g"], 1e-4),
        ("", "sd3", ["clip_l", "clip_g"], None),
        ("network_args = ['train_t5xxl=True']", "sd3", ["clip_l", "clip_g", "t5"], None),
        ("network_args = ['train_t5xxl=True']", "flux", ["clip_l", "t5"], None),
    ],
)
def test_sd_scripts(tmp_path: Path, more: str, family: str, train: list[str] | None, lr: float | None) -> None:
    found = sd_scripts(tmp_path, more, family)
    assert found.get("train") == train
    assert found.get("lr") == lr
    assert found.get("targets") == (["attention+mlp"] if train else None)


def test_rates_that_differ_are_said(tmp_path: Path) -> None:
    sd_scripts(tmp_path, "text_encoder_lr = [1e-5, 2e-5]")
    found = tomllib.loads((tmp_path / "ours.toml").read_text())
    assert (found["text_encoders"]["lr"], found["lora"]["rules"]) == (1e-5, [{"match": ["clip_g.*"], "lr": 2e-5}])


def test_diffusion_pipe_always_trains_sdxls(tmp_path: Path) -> None:

    theirs = """\
output_dir = '/out'
dataset = 'd.toml'
epochs = 1
[model]
type = 'sdxl'
checkpoint_path = '/m.safetensors'
unet_lr = 4e-5
text_encoder_2_lr = 0
[adapter]
type = 'lora'
rank = 8
[optimizer]
type = 'adamw'
lr = 2e-5
"""
    (tmp_path / "theirs.toml").write_text(theirs)
    import_config(str(tmp_path / "theirs.toml"), tmp_path / "ours.toml", "")
    found = tomllib.loads((tmp_path / "ours.toml").read_text())["text_encoders"]
    assert (found["train"], found["lr"]) == (["clip_l"], 2e-5)


def ai_toolkit(tmp_path: Path, model: str, train: str, dataset: str = "{folder_path: /d}") -> dict[str, Any]:
    """What is written for a job of ai-toolkit."""
    theirs = f"""\
job: extension
config:
  name: x
  process:
    - type: sd_trainer
      trigger_word: ohwx
      network: {{type: lora, linear: 8, linear_alpha: 4}}
      datasets: [{dataset}]
      train: {{lr: 1e-4, steps: 10, {train}}}
      model: {{{model}}}
"""
    (tmp_path / "theirs.yaml").write_text(theirs)
    (tmp_path / "ours.toml").unlink(missing_ok=True)
    import_config(str(tmp_path / "theirs.yaml"), tmp_path / "ours.toml", "")
    return tomllib.loads((tmp_path / "ours.toml").read_text())


def test_what_ai_toolkit_preserves(tmp_path: Path) -> None:
    model = "name_or_path: /m, is_xl: true"
    found = ai_toolkit(tmp_path, model, "blank_prompt_preservation: true, blank_prompt_preservation_multiplier: 0.5")
    assert found["preservation"] == {"kind": "blank", "weight": 0.5}
    prior = ai_toolkit(
        tmp_path, model, "train_text_encoder: true", "{folder_path: /d}, {folder_path: /e, prior_reg: true}"
    )
    assert prior["data"]["sets"][1]["regularization_target"] == "base"
    assert prior["text_encoders"]["train"] == ["clip_l", "clip_g"]


@pytest.mark.parametrize(
    "arch",
    ["zimage:turbo", "flux2_klein_4b", "flux2", "krea2", "anima", "chroma", "qwen_image_2", "qwen_image", "wan22_5b"],
)
def test_ai_toolkits_newer_models(tmp_path: Path, arch: str) -> None:
    found = ai_toolkit(tmp_path, f'name_or_path: /m, arch: "{arch}"', "timestep_type: sigmoid")
    assert found["lora"]["alpha"] == 8.0
    assert found["loss"]["timestep_sampling"] == "sigmoid"


def test_ai_toolkits_control_images(tmp_path: Path) -> None:
    numbered = "{folder_path: /d, control_path_1: /one, control_path_2: /two}"
    sampled = "}\n      sample: {prompts: [{prompt: night, ctrl_img: a.png}]}\n      save: {save_every: 5"
    found = ai_toolkit(tmp_path, "name_or_path: /m, arch: flux_kontext", f"timestep_type: sigmoid{sampled}", numbered)
    assert found["data"]["control"] == ["/one", "/two"]
    assert found["model"]["kontext"] is True
    assert found["sample"]["prompts"] == [{"text": "night", "control": ["a.png"]}]
    both = f"{numbered}, {{folder_path: /e, control_path: /three}}"
    found = ai_toolkit(tmp_path, "name_or_path: /m, arch: flux2_klein_4b", "timestep_type: sigmoid", both)
    assert [one["control"] for one in found["data"]["sets"]] == [["/one", "/two"], ["/three"]]


def _without(text: str, key: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(key))


def test_diffusion_pipes_control_images(tmp_path: Path) -> None:
    (tmp_path / "set.toml").write_text('resolutions = [512]\n[[directory]]\npath = "/d"\ncontrol_path = "/c"\n')
    (tmp_path / "pipe.toml").write_text(
        'output_dir = "/o"\ndataset = "set.toml"\n[model]\ntype = "flux"\ndtype = "bfloat16"\n'
        'diffusers_path = "/kontext"\n[adapter]\ntype = "lora"\nrank = 8\n[optimizer]\ntype = "adamw"\nlr = 1e-4\n'
    )
    import_config(str(tmp_path / "pipe.toml"), tmp_path / "ours.toml", "")
    assert tomllib.loads((tmp_path / "ours.toml").read_text())["data"]["control"] == ["/c"]


def test_a_trigger_is_put_into_tables_of_samples(tmp_path: Path) -> None:
    job = """\
job: extension
config:
  name: zk
  process:
    - type: sd_trainer
      trigger_word: zkfox
      network: {type: lora, linear: 8, linear_alpha: 8}
      model: {name_or_path: /m, arch: zimage}
      train: {steps: 10, lr: 1e-4}
      datasets: [{folder_path: /d, resolution: [512]}]
      sample:
        samples: [{prompt: "[trigger], woman", seed: 3}]
"""
    (tmp_path / "job.yaml").write_text(job)
    prompts = import_config(str(tmp_path / "job.yaml"), None)["carried"]["sample.prompts"]["value"]
    assert [one["text"] for one in prompts] == ["zkfox, woman"]


@pytest.mark.parametrize(("version", "key"), [("dev", "mistral"), ("klein-base-4b", "qwen3")])
def test_musubi_tuners_text_encoder_of_flux2(tmp_path: Path, version: str, key: str) -> None:
    (tmp_path / "run.sh").write_text(
        f"python src/musubi_tuner/flux_2_train_network.py --model_version {version} --dit dit.safetensors "
        "--text_encoder text.safetensors --network_module networks.lora_flux_2 --network_dim 8 --output_dir out\n"
    )
    found = import_config(str(tmp_path / "run.sh"), None)
    assert (found["family"], found["carried"][f"text_encoders.{key}"]["value"]) == ("flux2", "text.safetensors")


def test_simpletuners_flux2_dev(tmp_path: Path) -> None:
    told = {"model_type": "lora", "model_family": "flux2", "model_flavour": "dev", "data_backend_config": "b.json"}
    (tmp_path / "config.json").write_text(json.dumps({f"--{name}": value for name, value in told.items()}))
    found = import_config(str(tmp_path / "config.json"), None)
    assert found["carried"]["model.checkpoint"]["value"] == "hf:black-forest-labs/FLUX.2-dev"


@pytest.mark.parametrize(("name", "key"), [("FLUX.2-dev", "mistral"), ("FLUX.2-klein-base-4B", "qwen3")])
def test_onetrainers_text_encoder_of_flux2(tmp_path: Path, name: str, key: str) -> None:
    """Its length and its dropout; a guidance is of dev alone."""
    told = {"model_type": "FLUX_2", "training_method": "LORA", "base_model_name": f"black-forest-labs/{name}"}
    told |= {"lora_rank": 8, "text_encoder_sequence_length": 256, "output_model_destination": "lora.safetensors"}
    told |= {"text_encoder": {"dropout_probability": 0.1}, "transformer": {"guidance_scale": 3.5}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    found = import_config(str(tmp_path / "config.json"), None)
    assert found["carried"][f"text_encoders.{key}_tokens"]["value"] == 256
    assert found["carried"][f"text_encoders.{key}_dropout"]["value"] == 0.1
    assert ("loss.guidance_scale" in found["carried"]) == (key == "mistral")


@pytest.mark.parametrize(("version", "key"), [("", "mistral"), ("klein-base-4b", "qwen3")])
def test_musubi_tuners_usual_flux2_is_dev(tmp_path: Path, version: str, key: str) -> None:
    told = 'dit = "/m/flux2.safetensors"\ntext_encoder = "/m/text.safetensors"\nnetwork_dim = 8\n'
    told += 'network_module = "networks.lora_flux_2"\n' + (f'model_version = "{version}"\n' if version else "")
    (tmp_path / "musubi.toml").write_text(told)
    found = import_config(str(tmp_path / "musubi.toml"), None)
    assert found["carried"][f"text_encoders.{key}"]["value"] == "/m/text.safetensors"


@pytest.mark.parametrize(("file", "key"), [("mistral_3_small_flux2_bf16", "mistral"), ("qwen_3_4b", "qwen3")])
def test_diffusion_pipes_text_encoder_of_flux2(tmp_path: Path, file: str, key: str) -> None:
    (tmp_path / "set.toml").write_text('resolutions = [512]\n[[directory]]\npath = "/d"\n')
    (tmp_path / "pipe.toml").write_text(
        'output_dir = "/o"\ndataset = "set.toml"\n[model]\ntype = "flux2"\ndtype = "bfloat16"\n'
        f'diffusion_model = "/m"\ntext_encoders = [{{path = "/{file}.safetensors", type = "flux2"}}]\n'
        '[adapter]\ntype = "lora"\nrank = 8\n[optimizer]\ntype = "adamw"\nlr = 1e-4\n'
    )
    found = import_config(str(tmp_path / "pipe.toml"), None)
    assert found["carried"][f"text_encoders.{key}"]["value"] == f"/{file}.safetensors"
