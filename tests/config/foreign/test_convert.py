"""A dozen configs of other trainers become ours, with their values converted and what has no counterpart by line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from flame_train.config.load import load
from flame_train.errors import ConfigError
from flame_train.tools.import_config import import_config

from . import in_their_style as styles

FILES = {
    "flat.toml": styles.SD_FLAT,
    "sections.toml": styles.SD_SECTIONS,
    "run.sh": styles.SD_COMMAND,
    "set.toml": styles.SD_DATASET,
    "flux.yaml": styles.AI_TOOLKIT,
    "sdxl.yaml": styles.AI_TOOLKIT_SDXL,
    "preset.json": styles.ONETRAINER_PRESET,
    "knight.json": styles.ONETRAINER_CONFIG,
    "simple.json": styles.SIMPLETUNER,
    "config/backends.json": styles.SIMPLETUNER_BACKENDS,
    "pipe.toml": styles.DIFFUSION_PIPE,
    "dataset.toml": styles.DIFFUSION_PIPE_DATASET,
    "eri.yaml": styles.ERIDIFFUSION,
}
"""All in one folder, as in a project."""

FAMILY = {"flat.toml": "sdxl", "sections.toml": "sdxl"}
"""sd-scripts' TOML does not say which model it is for."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def imported(project: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result, and the sections of the file that was written."""
    out = project / "ours.toml"
    result = import_config(str(project / name), out, FAMILY.get(name, ""))
    return result, tomllib.loads(out.read_text())


EXPECTED: dict[str, dict[str, Any]] = {
    "flat.toml": {
        "model.checkpoint": "/models/illustrious.safetensors",
        "data.path": "/data/fox",
        "data.folder_repeats": True,
        "data.batch_size": 4,
        "data.resolution": 1024,
        "data.upscale": False,
        "data.caption_extension": ".txt",
        "lora.rank": 32,
        "lora.alpha": 16.0,
        "lora.targets": ["attention+mlp", "*.proj_in", "*.proj_out"],
        "optimizer.name": "prodigy",
        "optimizer.lr": 2e-4,
        "optimizer.d_coef": 0.8,
        "optimizer.weight_decay": 0.1,
        "optimizer.betas": [0.9, 0.99],
        "schedule.name": "cosine_restarts",
        "schedule.cycles": 3,
        "schedule.warmup": 0.05,
        "train.epochs": 10,
        "train.seed": 7,
        "checkpoint.every_epochs": 1,
        "checkpoint.keep": 4,
        "loss.weighting": "min_snr",
        "loss.snr_gamma": 5.0,
        "loss.offset_noise": 0.0357,
        "gradient.checkpointing": "full",
        "output.precision": "fp16",
        "output.name": "fox",
        "text_encoders.train": ["clip_l", "clip_g"],
        "text_encoders.lr": 1e-5,
        "text_encoders.targets": ["attention+mlp"],
    },
    "sections.toml": {
        "model.prediction": "v",
        "loss.zero_terminal_snr": True,
        "lora.kind": "lokr",
        "lora.factor": 8,
        "lora.targets": ["attention+mlp", "*.proj_in", "*.proj_out"],
        "optimizer.name": "adamw8bit",
        "schedule.name": "constant",
        "schedule.warmup_steps": 100,
        "train.steps": 1500,
        "checkpoint.every": 300,
        "checkpoint.keep": 4,
        "loss.weighting": "debiased",
        "data.resolution": 888,
        "data.upscale": True,
        "data.caption_extension": ".caption",
        "train.precision": "fp32",
    },
    "run.sh": {
        "model.checkpoint": "/models/flux1-dev.safetensors",
        "model.vae": "/models/ae.safetensors",
        "model.quantize": "fp8",
        "model.offload": "auto",
        "gradient.checkpointing": "full",
        "text_encoders.t5": "/models/t5xxl.safetensors",
        "data.path": "/data/portraits",
        "data.repeats": 5,
        "data.batch_size": 2,
        "data.caption": "ohwx man",
        "lora.targets": ["single_blocks.*"],
        "optimizer.name": "adafactor",
        "optimizer.relative_step": False,
        "loss.timestep_sampling": "sigmoid",
        "loss.shift": 3.1582,
        "loss.guidance_scale": 1.0,
        "schedule.name": "constant",
        "train.epochs": 4,
        "text_encoders.train": ["clip_l"],
    },
    "flux.yaml": {
        "model.checkpoint": "hf:black-forest-labs/FLUX.1-dev",
        "text_encoders.t5_padding": "zeros",
        "model.quantize": "fp8",
        "model.offload": 1.0,
        "data.path": "/data/tiles",
        "data.caption_dropout": 0.05,
        "lora.rank": 32,
        "lora.alpha": 32.0,
        "optimizer.name": "adamw8bit",
        "optimizer.weight_decay": 1e-4,
        "train.steps": 1800,
        "train.ema_decay": 0.99,
        "loss.timestep_sampling": "sigmoid",
        "loss.shift": 1.0,
        "checkpoint.keep": 3,
        "sample.prompts": ["t1le on a wall"],
        "sample.guidance_scale": 4.0,
        "output.dir": "output/tile_v1",
        "output.trigger": "t1le",
        "preservation.kind": "class",
        "preservation.weight": 1.0,
        "preservation.class_word": "person",
    },
    "sdxl.yaml": {
        "lora.kind": "lokr",
        "lora.full_matrix": True,
        "lora.factor": 8,
        "optimizer.name": "automagic",
        "loss.weighting": "min_snr",
        "data.repeats": 2,
        "sample.negative": "blurry",
        "output.precision": "fp16",
    },
    "preset.json": {
        "model.checkpoint": "hf:stabilityai/stable-diffusion-3.5-medium",
        "model.quantize": "nf4",
        "lora.alpha": 1.0,
        "optimizer.lr": 3e-4,
        "schedule.name": "constant",
        "schedule.warmup_steps": 200,
        "train.epochs": 100,
        "train.precision": "fp16",
        "loss.timestep_sampling": "logit_normal",
        "loss.shift": 3.0,
        "output.dir": "models/medium",
    },
    "knight.json": {
        "data.path": "/data/knight",
        "data.repeats": 3,
        "lora.kind": "dora",
        "lora.alpha": 4.0,
        "lora.targets": ["attention"],
        "optimizer.name": "prodigy",
        "optimizer.lr": 2e-4,
        "optimizer.betas": [0.9, 0.99],
        "schedule.name": "rex",
        "train.epochs": 20,
        "train.ema_decay": 0.998998,
        "checkpoint.every": 500,
        "sample.every_epochs": 2,
        "gradient.checkpointing": "offload",
        "model.offload": 0.7,
        "loss.snr_gamma": 3.0,
        "loss.max_timestep": 900,
        "model.quantize": "fp8",
        "text_encoders.train": ["clip_l"],
        "text_encoders.targets": ["full"],
    },
    "simple.json": {
        "data.path": "/data/lights",
        "data.repeats": 5,
        "lora.rank": 64,
        "lora.alpha": 64.0,
        "lora.targets": ["joint_blocks.*.x_block.attn*"],
        "schedule.name": "polynomial",
        "gradient.clip_norm": 1.0,
        "loss.shift": 3.0,
        "train.steps": 2000,
        "sample.width": 1024,
        "sample.height": 768,
        "output.format": "diffusers",
    },
    "pipe.toml": {
        "model.quantize": "fp8",
        "data.path": "/data/gray",
        "data.resolution": 512,
        "data.repeats": 3,
        "lora.alpha": 32.0,
        "optimizer.name": "adamw",
        "train.epochs": 60,
        "gradient.accumulation": 4,
        "checkpoint.every_epochs": 5,
        "loss.timestep_sampling": "logit_normal",
        "loss.shift": 0.0,
        "output.format": "diffusers",
    },
    "eri.yaml": {
        "model.checkpoint": "/models/sd35.safetensors",
        "text_encoders.t5": "/models/t5.safetensors",
        "gradient.accumulation": 2,
        "schedule.name": "constant",
        "train.precision": "bf16",
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_are_carried_over_and_converted(project: Path, name: str) -> None:
    _, tree = imported(project, name)
    for path, value in EXPECTED[name].items():
        section, key = path.split(".")
        assert tree[section][key] == value, path


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_written_is_a_config_once_it_is_filled_in(project: Path, name: str) -> None:
    result, _ = imported(project, name)
    wanted = {line.partition(":")[0] for line in result["missing"]}
    assert wanted <= {"data.path", "output.dir"}
    load(str(project / "ours.toml"), [f"{path}=x" for path in wanted])


LOST = {
    "sections.toml": ["enable_bucket (sd-scripts's default): images go into buckets of their shape"],
    "knight.json": [
        "backup_after = 30",
    ],
    "simple.json": ["simple.json:25: push_to_hub = true: output.hub names the owner too, owner/name"],
    "pipe.toml": ["pipe.toml:10: checkpoint_every_n_minutes = 120: an interval in minutes"],
}


@pytest.mark.parametrize("name", LOST)
def test_what_has_listed_is_listed_with_its_line(project: Path, name: str) -> None:
    result, _ = imported(project, name)
    for text in LOST[name]:
        assert any(text in line for line in result["listed"]), result["listed"]
    for line in result["listed"]:
        assert line in (project / "ours.toml").read_text()


def test_nothing_is_lost_without_a_word(project: Path) -> None:
    """A setting that no table knows is named."""
    (project / "flat.toml").write_text(styles.SD_FLAT + "quantum_leap = 3\n")
    result, _ = imported(project, "flat.toml")
    number = styles.SD_FLAT.count("\n") + 1
    assert any(f"flat.toml:{number}: quantum_leap = 3: not known" in line for line in result["listed"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("flat.toml", ("", ""), "does not say which model it is for; add --family"),
        (
            "flux.yaml",
            ("is_flux: true", "arch: wan21"),
            "flux.yaml:33: arch = wan21: expected one of sdxl, sd1, ",
        ),
        ("flux.yaml", ("network:", "adapter:"), "expected a LoRA"),
        ("preset.json", ('"LORA"', '"FINE_TUNE"'), "preset.json:4: training_method = FINE_TUNE: expected LORA"),
        (
            "preset.json",
            ("STABLE_DIFFUSION_35", "WUERSTCHEN_2"),
            "preset.json:3: model_type = WUERSTCHEN_2: expected one",
        ),
        ("preset.json", ('"LORA",', '"LORA"'), "preset.json:5: expected JSON, got a syntax error"),
        ("simple.json", ('"sd3"', '"ltxvideo"'), "simple.json:2: model_family = ltxvideo"),
        (
            "pipe.toml",
            ("type = 'flux'", "type = 'ltx-video'"),
            "pipe.toml:14: type = ltx-video: expected one of sdxl, ",
        ),
        ("run.sh", ("flux_train_network.py", "lumina_train_network.py"), "got a command of lumina_train_network.py"),
        ("flat.toml", ("network_dim", "cond_emb_dim = 32\nnetwork_dim"), "got a ControlNet-LLLite (cond_emb_dim)"),
        ("eri.yaml", ("sd3\n", "hidream\n"), "eri.yaml:1: model_kind = hidream"),
        ("eri.yaml", ("model_kind: sd3\n", ""), "its keys are of none of them"),
    ],
)
def test_a_config_for_something_else_is_refused(
    project: Path, name: str, change: tuple[str, str], message: str
) -> None:
    path = project / name
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ConfigError) as caught:
        import_config(str(path), project / "ours.toml")
    assert message in str(caught.value)
    assert not (project / "ours.toml").exists()


def test_a_file_that_is_named_and_missing_is_told(project: Path) -> None:
    (project / "dataset.toml").unlink()
    result, _ = imported(project, "pipe.toml")
    assert any(
        "pipe.toml:2: dataset = 'dataset.toml': no such file beside this one" in line for line in result["listed"]
    )
    assert any(line.startswith("data.path") for line in result["missing"])


def test_a_file_is_found_below_a_folder_above(project: Path) -> None:
    """SimpleTuner's paths begin at its own folder, not at the config's."""
    below = project / "config" / "user"
    below.mkdir()
    (below / "simple.json").write_text(styles.SIMPLETUNER)
    result = import_config(str(below / "simple.json"), None)
    assert result["carried"]["data.path"]["value"] == "/data/lights"


def test_an_existing_file_stays(project: Path) -> None:
    from flame_train.errors import OutputError

    (project / "ours.toml").write_text("mine")
    with pytest.raises(OutputError, match="--force"):
        imported(project, "flux.yaml")
    assert (project / "ours.toml").read_text() == "mine"
