"""What `sd3-lora` and `flux-lora` refuse or warn of, each at its place, and what a checkpoint lacks."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.config.schema import Config, DataSection, LossSection, ModelSection, SampleSection, TextEncodersSection
from flame_train.config.training_sections import OutputSection
from flame_train.errors import ConfigError
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.models.common.small import write_small
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.models.registry import FAMILIES
from flame_train.run.check.check_run import check
from tests.recipes.conftest import small_networks
from tests.recipes.test_flow import Train, planned


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss.weighting=min_snr", 'loss.weighting: "min_snr" has no formula for '),
        ("text_encoders.t5=missing.safetensors", "missing.safetensors"),
        ("data.bucket_step=8", "data.bucket_step: expected a multiple of 16"),
        ("sample.steps=1001", "sample.steps: expected"),
    ],
)
def test_what_makes_no_sense_is_refused(
    train: Train, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--set", setting, "--dry-run") in (2, 3)
    assert message in capsys.readouterr().err


def test_a_choice_of_blocks_that_are_not_there_is_refused_at_its_place(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("gradient.checkpointing=full", 'gradient.checkpoint_blocks=["*", "up_blocks.*"]')
    assert train("--dry-run", *(word for setting in asked for word in ("--set", setting))) == 2
    told = capsys.readouterr().err
    assert '--set: gradient.checkpoint_blocks: no block of the model that "full" recomputes is named by\n' in told
    assert "  'up_blocks.*'" in told
    assert "_blocks.0'" in told


def test_a_model_that_is_told_no_guidance_refuses_one(drawn: Path, tmp_path: Path) -> None:
    schnell = Flux(FluxArch.tiny(guidance=False, context_dim=64))
    base = write_small({**small_networks("flux"), "model.diffusion_model.": schnell}, tmp_path, 0)
    config = Config(
        model=ModelSection(checkpoint=str(base)),
        loss=LossSection(guidance_scale=3.5),
        data=DataSection(path=str(drawn)),
        output=OutputSection(dir=str(tmp_path / "run")),
    )
    with pytest.raises(ConfigError, match=r"loss.guidance_scale: this model has no guidance input, got 3.5; remove it"):
        check(config, FAMILIES["flux"])


def test_a_guidance_for_a_family_that_is_told_none_is_refused_once(
    train: Train, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--set", "loss.guidance_scale=2.0", "--dry-run") == (2 if family == "sd3" else 0)
    assert capsys.readouterr().err.count("loss.guidance_scale: ") == (family == "sd3")


def test_a_negative_prompt_that_would_not_be_seen_is_refused(
    train: Train, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Flux dev hears its guidance; SD3 sees the prompt unless its guidance is off. What is drawn with is recorded."""
    seen = family == "sd3"
    assert train("--set", "sample.negative=blurred", "--dry-run") == (0 if seen else 2)
    assert seen or "sample.negative: expected none, got 'blurred'" in capsys.readouterr().err
    assert train("--set", "sample.negative=blurred", "--set", "sample.guidance_scale=1.0", "--dry-run") == 2
    assert train("--set", "train.steps=1", "--set", "sample.steps=0") == 0
    written = tomllib.loads((tmp_path / "run" / "it" / "config.toml").read_text())["sample"]
    assert (written["steps"], written["guidance_scale"]) == (28, {"sd3": 4.5, "flux": 3.5}[family])


def test_a_caption_that_is_too_long_is_told_with_the_key_that_lengthens_it(
    base: Path,
    family: str,
    drawn: Path,
    small_config: Callable[..., Config],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    shutil.copytree(drawn, tmp_path / "long")
    next((tmp_path / "long").glob("*.txt")).write_text("a red circle " * 300)
    config = Config(
        model=ModelSection(checkpoint=str(base)),
        sample=SampleSection(prompts=("a red disc " * 99, "a disc")),
        data=DataSection(path=str(tmp_path / "long"), resolution=64, bucket_step=32),
        text_encoders=TextEncodersSection(t5_tokens=154),
        output=OutputSection(dir=str(tmp_path / "run")),
    )
    planned(family, config)
    planned("sdxl", small_config(data={"path": str(tmp_path / "long")}))
    told = [record.message for record in caplog.records if "longer than" in record.message]
    assert told == [
        f"1 {what} is longer than {limit}; the rest is not seen"
        for what, limit in (
            ("caption", "text_encoders.t5_tokens=154"),
            ("prompt", "text_encoders.t5_tokens=154"),
            ("caption", "data.max_tokens=75"),
        )
    ]


def test_sides_that_sd3_has_no_positions_for_are_refused_by_the_plan(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 positions of 16 pixels: a bucket 512 wide would be met when all is encoded."""
    (tmp_path / "wide").mkdir()
    Image.new("RGB", (512, 128)).save(tmp_path / "wide" / "a.png")
    (tmp_path / "wide" / "a.txt").write_text("a bar")
    own = [f"model.checkpoint={bases['sd3']}", f"data.path={tmp_path / 'wide'}", f"output.dir={tmp_path / 'run'}"]
    own += ["data.bucket_step=32", "sample.prompts=['a disc']"]
    (tmp_path / "config.toml").write_text("")

    def plan(*settings: str) -> int:
        sets = [word for setting in (*own, *settings) for word in ("--set", setting)]
        return cli.run(["sd3-lora", "--config", str(tmp_path / "config.toml"), "--device", "cpu", "--dry-run", *sets])

    assert plan("data.resolution=256") == 2
    assert "a side of 512, and this model has positions for 256; set data.max_bucket = 256" in capsys.readouterr().err
    assert plan("data.resolution=256", "data.max_bucket=256") == 0
    assert plan("data.resolution=256", "data.max_bucket=256", "sample.width=288") == 2
    assert "sample.width: expected at most 256" in capsys.readouterr().err


def test_sdxl_refuses_what_is_of_the_flow_families(small_config: Callable[..., Config]) -> None:
    asked = small_config(loss={"shift": 3.0}, text_encoders={"t5": "t5.safetensors", "t5_tokens": 77})
    with pytest.raises(ConfigError) as refused:
        check(asked, FAMILIES["sdxl"])
    assert 'loss.shift: expected model.prediction = "flow"' in str(refused.value)
    for told in ("text_encoders.t5", "text_encoders.t5_tokens"):
        assert f"{told}: it has no effect on SDXL, got " in str(refused.value)


def test_a_checkpoint_without_text_encoders_needs_their_files(
    base: Path, train: Train, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, wanted: str, prefix: str) -> Path:
        with open_weights(base) as weights:
            chosen = {n.removeprefix(prefix): np.array(weights.read(n)) for n in weights.names if wanted in n}
        save_file(tmp_path / name, chosen)
        return tmp_path / name

    with open_weights(base) as weights:
        rest = {n: np.array(weights.read(n)) for n in weights.names if not n.startswith("text_encoders.")}
    save_file(tmp_path / "alone.safetensors", rest)
    save_file(tmp_path / "bare.safetensors", {n: a for n, a in rest.items() if not n.startswith("first_stage_model.")})
    assert train("--set", f"model.checkpoint={tmp_path / 'bare.safetensors'}", "--dry-run") == 2
    told = re.findall(r"((?:model|text_encoders)\.\w+): ", capsys.readouterr().err)
    clips = ["text_encoders.clip_l"] if family == "flux" else ["text_encoders.clip_l", "text_encoders.clip_g"]
    assert told == ["model.vae", *clips, "text_encoders.t5"]
    alone = ["--set", f"model.checkpoint={tmp_path / 'alone.safetensors'}"]
    shutil.copy(base.parent / "tokenizer.json", tmp_path)
    options = {"clip_l": "clip_l", "clip_g": "clip_g", "t5": "t5xxl"}
    for option, name in options.items():
        if family == "flux" and option == "clip_g":
            continue
        file = part(f"{name}.safetensors", f".{name}.", f"text_encoders.{name}.transformer.")
        alone += ["--set", f"text_encoders.{option}={file}"]
    assert train(*alone, "--dry-run") == 0, capsys.readouterr().err


def test_a_checkpoint_without_a_vae_needs_its_file(
    base: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As flux1-dev.safetensors is published: the message names the key that takes ae.safetensors."""
    with open_weights(base) as weights:
        tensors = {n: np.array(weights.read(n)) for n in weights.names}
    prefix = "first_stage_model."
    save_file(tmp_path / "alone.safetensors", {n: a for n, a in tensors.items() if not n.startswith(prefix)})
    save_file(
        tmp_path / "ae.safetensors", {n.removeprefix(prefix): a for n, a in tensors.items() if n.startswith(prefix)}
    )
    shutil.copy(base.parent / "tokenizer.json", tmp_path)
    alone = ["--set", f"model.checkpoint={tmp_path / 'alone.safetensors'}"]
    assert train(*alone, "--dry-run") == 2
    assert "model.vae: " in capsys.readouterr().err
    assert train(*alone, "--set", f"model.vae={tmp_path / 'ae.safetensors'}", "--dry-run") == 0, capsys.readouterr().err
