"""Wan 2.2 5B as other trainers' configs have it, and other Wans, which are refused by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flame_train.errors import ConfigError
from flame_train.tools.import_config import import_config

_WAN = {"model_type": "lora", "model_family": "wan", "data_backend_config": "b.json", "tokenizer_max_length": 226}
_5B = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"


@pytest.mark.parametrize(
    "named",
    [
        {"model_flavour": "ti2v-5b-2.2", "aspect_bucket_alignment": 8},
        {"pretrained_model_name_or_path": _5B, "pretrained_t5_model_name_or_path": _5B, "aspect_bucket_alignment": 64},
    ],
)
def test_simpletuners_wan(tmp_path: Path, named: dict[str, Any]) -> None:
    """Sides of a flavour are its own, whatever the file says (helpers/models/wan/model.py:1529)."""
    told = _WAN | named | {"text_encoder_1_precision": "int8-quanto"}
    (tmp_path / "config.json").write_text(json.dumps(told))
    found = import_config(str(tmp_path / "config.json"), None)
    values = {key: each["value"] for key, each in found["carried"].items()}
    expected = {"model.checkpoint": f"hf:{_5B}", "text_encoders.precision": "int8", "loss.shift": 3.0}
    expected["data.bucket_step"] = 64 if "model_flavour" in named else 32
    assert found["family"] == "wan"
    assert expected.items() <= values.items()
    assert "tokenizer_max_length" in found["needless"]
    assert "text_encoders.t5" not in values
    assert not any("pretrained" in line for line in found["listed"])


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({}, "t2v-480p-1.3b-2.1 is none that is known here"),
        ({"model_flavour": "i2v-14b-2.2-low"}, "i2v-14b-2.2-low is none that is known here"),
        ({"pretrained_model_name_or_path": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"}, "Wan2.1 is not trained here"),
        (
            {"pretrained_model_name_or_path": "https://huggingface.co/Wan-AI/Wan2.1-T2V/resolve/main/m.safetensors"},
            "Wan2.1 is not trained here",
        ),
    ],
)
def test_simpletuners_other_wans_are_refused(tmp_path: Path, named: dict[str, str], told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_WAN | named))
    with pytest.raises(ConfigError, match=told):
        import_config(str(tmp_path / "config.json"), None)


@pytest.mark.parametrize(
    "path",
    [
        "/models/wan2.1/wan2.2_ti2v_5B_fp16.safetensors",
        "/models/wan-14b-tests/Wan2.2-TI2V-5B-Diffusers/",
        "C:\\wan21\\mine.safetensors",
        "wan2.1-like-wan2.2-ti2v-5b.safetensors",
    ],
)
def test_a_folder_above_says_nothing_of_the_model(tmp_path: Path, path: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_WAN | {"pretrained_model_name_or_path": path}))
    assert import_config(str(tmp_path / "config.json"), None)["carried"]["model.checkpoint"]["value"] == path


def test_diffusion_pipes_wan(tmp_path: Path) -> None:
    """Its folder has pickles, so ComfyUI's files are named beside it."""
    (tmp_path / "set.toml").write_text('resolutions = [512]\n[[directory]]\npath = "/d"\n')
    theirs = (
        'output_dir = "/o"\ndataset = "set.toml"\n[model]\ntype = "wan"\ndtype = "bfloat16"\n'
        'ckpt_path = "/wan"\ntransformer_path = "/wan2.2_ti2v_5B_fp16.safetensors"\nllm_path = "/umt5.safetensors"\n'
        '[adapter]\ntype = "lora"\nrank = 8\n[optimizer]\ntype = "adamw"\nlr = 1e-4\n'
    )
    for text, checkpoint in (
        (theirs, "/wan2.2_ti2v_5B_fp16.safetensors"),
        (_alone(theirs), "/wan"),
    ):
        (tmp_path / "pipe.toml").write_text(text)
        (tmp_path / "ours.toml").unlink(missing_ok=True)
        result = import_config(str(tmp_path / "pipe.toml"), tmp_path / "ours.toml", "")
        assert result["family"] == "wan"
        found = tomllib.loads((tmp_path / "ours.toml").read_text())
        assert found["model"]["checkpoint"] == checkpoint
        assert found["text_encoders"]["t5"] == "/umt5.safetensors"
        assert "pickle" in str(result)
    (tmp_path / "pipe.toml").write_text(_alone(theirs).replace("/wan", "/data/Wan2.1-T2V-14B"))
    with pytest.raises(ConfigError, match=r"pipe\.toml:6: .*Wan2\.1-T2V-14B.*: Wan2\.1 is not trained here"):
        import_config(str(tmp_path / "pipe.toml"), None)


def _alone(text: str) -> str:
    """Returns the config without the transformer's file."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("transformer_path"))


@pytest.mark.parametrize(
    ("arch", "kind", "expected"),
    [
        ("wan22_5b", "wan", "kohya"),
        ("anima", "anima", "kohya"),
        ("sdxl", "sdxl", "kohya"),
        ("flux", "flux", "diffusers"),
        ("krea2", "krea2", "diffusers"),
    ],
)
def test_a_lora_is_written_with_names_that_comfyui_reads(tmp_path: Path, arch: str, kind: str, expected: str) -> None:
    """As those of both trainers are: ai-toolkit's `save_format` is of whole models (BaseSDTrainProcess.py, save).

    Of Wan, Anima and SDXL's attention ComfyUI does not take diffusers' names (docs/conventions.md).
    """
    (tmp_path / "job.yaml").write_text(
        "job: extension\nconfig:\n  name: x\n  process:\n  - type: sd_trainer\n    network: {type: lora, linear: 8}\n"
        "    train: {lr: 1e-4, steps: 9}\n    save: {save_format: diffusers}\n"
        f"    model: {{name_or_path: /m, arch: {arch}}}\n"
    )
    (tmp_path / "pipe.toml").write_text(
        f'output_dir = "/o"\ndataset = "x.toml"\nepochs = 1\n[model]\ntype = "{kind}"\ntransformer_path = "/m"\n'
        '[adapter]\ntype = "lora"\nrank = 8\n[optimizer]\ntype = "adamw"\nlr = 1e-4\n'
    )
    for name in ("job.yaml", "pipe.toml"):
        found = import_config(str(tmp_path / name), None, partial=True)
        assert (found["family"], found["carried"]["output.format"]["value"]) == (kind, expected)


def test_control_images_of_a_model_without_them_are_named(tmp_path: Path) -> None:
    """ai-toolkit begins a clip with one; the config would be refused here."""
    (tmp_path / "job.yaml").write_text(
        "job: extension\nconfig:\n  name: x\n  process:\n  - type: sd_trainer\n    network: {type: lora, linear: 8}\n"
        "    datasets: [{folder_path: /d, control_path: /c, num_frames: 33}]\n    train: {lr: 1e-4, steps: 9}\n"
        f"    model: {{name_or_path: {_5B}, arch: wan22_5b}}\n"
        "    sample: {samples: [{prompt: a, ctrl_img: /a.png}, {prompt: b --ctrl_img /b.png}]}\n"
    )
    found = import_config(str(tmp_path / "job.yaml"), None)
    assert found["carried"]["sample.prompts"]["value"] == ["a", "b"]
    assert "control" not in "".join(found["carried"])
    told = [line for line in found["listed"] if line.endswith("this model looks at no control images here")]
    assert [line.split(": ", 1)[1] for line in told] == [
        f"{what}: this model looks at no control images here"
        for what in (
            "sample.samples: ctrl_img of the prompt 'a'",
            "sample.samples: ctrl_img of the prompt 'b'",
            "control_path = ['/c']",
        )
    ]
