"""No answer to another trainer's key leads to a setting with another unit, the opposite sense, or of another family."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame_train import cli
from flame_train.config.keys import keys
from flame_train.config.load import load_located
from flame_train.config.suggest import answer
from flame_train.errors import ConfigError
from flame_train.models.registry import FAMILIES

WRONG = {
    "bucket_no_upscale": ("data.upscale is the opposite switch", "did you mean"),
    "max_train_epochs": ("train.epochs counts epochs", "did you mean"),
    "train.max_epochs": ("train.epochs counts epochs", "ema_decay"),
    "save_every_n_epochs": ("checkpoint.every_epochs counts epochs", "did you mean"),
    "sample_every_n_epochs": ("sample.every_epochs counts epochs", "did you mean"),
    "save_last_n_steps": ("a span of steps there", "did you mean"),
    "save_last_n_epochs": ("a span of epochs there", "did you mean"),
    "reg_data_dir": ("regularization", "data.path"),
    "vae_batch_size": ("not needed", "data.batch_size"),
    "save_precision": ("output.precision", "vae_precision"),
    "min_timestep": ("loss.min_timestep is the same", "timestep_sampling"),
    "max_timestep": ("loss.max_timestep is the same", "timestep_sampling"),
    "network_module": ("lora.kind says which kind", "did you mean"),
    "model.path": ("model.checkpoint", "data.path"),
    "model.type": ("not needed", "fp8"),
    "model.clip_skip": ("of SD 1.5 and 2.1 it is text_encoders.clip_skip; SDXL always has the penultimate", "clip_l"),
    "clip_skip": ("of SD 1.5 and 2.1 it is text_encoders.clip_skip", "clip_l"),
    "data.cache_latents": ("always on", "data.cache "),
    "cache_text_encoder_outputs": ("always on", "did you mean"),
    "optimizer_type": ("optimizer.name", "optimizer.eps"),
    "optimizer_args": ("keys of [optimizer]", "optimizer.lr"),
    "network_args": ("keys of [lora]", "did you mean"),
    "meta": ("output.title", "did you mean"),
    "network_train_unet_only": ("always on", "did you mean"),
    "text_encoder_lr": ("text_encoders.lr is the rate of those that text_encoders.train names", "did you mean"),
    "enable_bucket": ("always on", "did you mean"),
    "alpha_mask": ('data.masks = "alpha"', "did you mean"),
    "conditioning_data_dir": ("data.mask_folder", "did you mean"),
    "token_warmup_step": ("not here", "did you mean"),
    "secondary_separator": ("not here", "did you mean"),
    "face_crop_aug_range": ("not here", "did you mean"),
    "caption_dropout_every_n_epochs": ("is a share of the images", "did you mean"),
    "log_with": ("output.tensorboard is a switch", "did you mean"),
    "wandb_api_key": ("not here", "did you mean"),
    "xformers": ("not needed", "did you mean"),
    "lr_scheduler_min_lr_ratio": ("a rate, and no ratio", "did you mean"),
    "debiased_estimation_loss": ('loss.weighting = "debiased"', "did you mean"),
}
"""Keys, part of the sentence that answers them, and what no answer may say, as one did that led to a wrong setting."""


@pytest.mark.parametrize("path", WRONG)
def test_a_key_that_means_something_else_gets_a_sentence(path: str) -> None:
    said, wrong = WRONG[path]
    told = answer(path)
    assert said in told
    assert wrong not in told


OTHERWISE = [path for path, (said, wrong) in WRONG.items() if wrong == "did you mean"]


@pytest.mark.parametrize("path", OTHERWISE)
def test_a_sentence_says_where_settings_went(path: str) -> None:
    assert "docs/conventions.md" in answer(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_is_suggested_that_the_family_lacks(family: str) -> None:
    lacking = FAMILIES[family].unsupported_keys()
    for path in keys():
        for asked in (path.replace("_", ""), path.partition(".")[2], f"{path}s"):
            told = answer(asked, lacking)
            assert not any(f" {key}" in told.replace("?", " ").split("mean")[-1].split() for key in lacking)


def test_the_command_of_a_family_passes_on_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[text_encoders]\nt5_token = 77\n")
    assert cli.run(["flux-lora", "--config", str(path), "--dry-run"]) == 2
    assert "did you mean text_encoders.t5_tokens?" in capsys.readouterr().err
    assert cli.run(["sdxl-lora", "--config", str(path), "--dry-run"]) == 2
    assert "t5_tokens" not in capsys.readouterr().err


def test_an_unknown_section_is_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[network]\nnetwork_dim = 4\nclip_skip = 2\nqqqq = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_located(str(path))
    told = str(caught.value).splitlines()
    assert any(line.startswith(f"{path}:1: network: unknown section") for line in told)
    assert any(line.startswith(f"{path}:2: network.network_dim: unknown key; did you mean lora.rank?") for line in told)
    assert any(line.startswith(f"{path}:3: network.clip_skip: unknown key; of SD 1.5") for line in told)
    assert not any("qqqq" in line for line in told)


PATHS = {
    "model.checkpoint": "/nowhere/base.safetensors",
    "data.path": "/nowhere/images",
    "lora.from": "/nowhere/lora.safetensors",
    "model.vae": "/nowhere/vae.safetensors",
    "text_encoders.clip_l": "/nowhere/clip_l.safetensors",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_leads_nowhere_is_told_with_its_key_and_line(
    tmp_path: Path, small_base: Path, drawn: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"model.checkpoint": str(small_base), "data.path": str(drawn), "output.dir": str(tmp_path / "run")}
    given |= {"data.resolution": 96, "data.bucket_step": 32, "train.precision": "fp32", path: PATHS[path]}
    lines: list[str] = []
    for section in dict.fromkeys(key.partition(".")[0] for key in given):
        lines.append(f"[{section}]")
        lines += [f"{k.partition('.')[2]} = {v!r}" for k, v in given.items() if k.startswith(f"{section}.")]
    config = tmp_path / "x.toml"
    config.write_text("\n".join(lines))
    assert cli.run(["train", "--config", str(config), "--device", "cpu", "--dry-run"]) in (2, 3)
    line = next(i for i, text in enumerate(lines, 1) if PATHS[path] in text)
    assert f"{config}:{line}: {path}: {PATHS[path]}" in capsys.readouterr().err
