"""What SimpleTuner does where its config is silent: the model of a family, an adapter for it, the delta of a loss."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from tests.config.foreign.test_meaning import imported, tuner

USUAL = {  # DEFAULT_MODEL_FLAVOUR and HUGGINGFACE_PATHS of helpers/models/*/model.py
    "flux": "black-forest-labs/FLUX.1-Krea-dev",
    "sd3": "stabilityai/stable-diffusion-3.5-medium",
    "flux2": "black-forest-labs/FLUX.2-klein-base-9B",
    "qwen_image": "Qwen/Qwen-Image-2512",
    "anima": "CalamitousFelicitousness/Anima-Preview-3-sdnext-diffusers",
    "chroma": "lodestones/Chroma1-Base",
    "krea2": "krea/Krea-2-Raw",
    "z_image": "Tongyi-MAI/Z-Image-Turbo",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
}


@pytest.mark.parametrize("family", USUAL)
def test_the_model_that_it_takes_where_none_is_named(tmp_path: Path, family: str) -> None:
    assert imported(tmp_path, tuner(model_family=family))["values"]["model.checkpoint"] == f"hf:{USUAL[family]}"


def test_the_model_of_a_flavour(tmp_path: Path) -> None:
    files = tuner(model_family="z_image", model_flavour="ostris-de-turbo")
    assert imported(tmp_path, files)["values"]["model.checkpoint"] == "hf:ostris/Z-Image-De-Turbo"


@pytest.mark.parametrize(
    ("settings", "carried", "listed"),
    [
        ({"pretrained_model_name_or_path": "Tongyi-MAI/Z-Image"}, False, False),
        ({"pretrained_model_name_or_path": "Tongyi-MAI/Z-Image", "assistant_lora_path": "a/b"}, False, True),
        ({"pretrained_model_name_or_path": "mine.safetensors", "model_flavour": "turbo"}, True, False),
    ],
)
def test_only_a_distilled_flavour_gets_an_adapter(
    tmp_path: Path, settings: dict[str, Any], carried: bool, listed: bool
) -> None:
    """A model that is named has no flavour by default, so that nothing is added to it."""
    result = imported(tmp_path, tuner(model_family="z_image", **settings))
    assert ("model.training_adapter" in result["values"]) == carried
    assert any("assistant_lora_path" in line for line in result["listed"]) == listed


@pytest.mark.parametrize(
    ("settings", "expected", "said"),
    [
        ({"model_family": "sdxl", "loss_type": "huber"}, ("huber", "snr", None), ""),
        ({"model_family": "sdxl", "loss_type": "smooth_l1", "huber_c": 0.2}, ("smooth_l1", "snr", 0.2), ""),
        ({"loss_type": "huber", "huber_schedule": "constant", "huber_c": "0.2"}, ("huber", "constant", 0.2), ""),
        ({"loss_type": "huber", "huber_schedule": "exponential"}, ("huber", "exponential", None), ""),
        ({"loss_type": "huber"}, ("huber", None, None), "another formula"),
        ({"loss_type": "l2", "huber_schedule": "snr", "huber_c": 0.2}, (None, None, None), ""),
        ({"loss_type": "hinge"}, (None, None, None), "no such loss"),
    ],
)
def test_the_delta_of_a_loss(tmp_path: Path, settings: dict[str, Any], expected: tuple[Any, ...], said: str) -> None:
    """It follows the noise level where nothing is said; of flow matching by a formula that is not here."""
    result = imported(tmp_path, tuner(**settings))
    found = tuple(result["values"].get(f"loss.{key}") for key in ("kind", "huber_schedule", "huber_c"))
    lines = [line for line in result["listed"] if "loss_type" in line or "huber" in line]
    assert found == expected
    assert [said in line for line in lines] == [True] * bool(said)


def test_what_it_does_where_nothing_is_said(tmp_path: Path) -> None:
    """Defaults of field_registry/sections/*.py; its model alone is known of a config as short as in its guides."""
    short = {"model_family": "krea2", "model_type": "lora", "pretrained_model_name_or_path": "krea/Krea-2-Raw"}
    values = imported(tmp_path, {"c.json": json.dumps(short)})["values"]
    assert (values["lora.dropout"], values["data.caption_dropout"]) == (0.1, 0.1)
    assert (values["optimizer.eps"], values["gradient.checkpointing"], values["train.epochs"]) == (1e-6, "full", 1)


def test_a_zero_wins_over_its_defaults(tmp_path: Path) -> None:
    off = {"lora_dropout": 0, "caption_dropout_probability": 0.0, "gradient_checkpointing": False}
    values = imported(tmp_path, tuner(**off))["values"]
    keys = ("lora.dropout", "data.caption_dropout", "gradient.checkpointing", "train.epochs")
    assert not [key for key in keys if key in values]
    assert "lora.dropout" not in imported(tmp_path, tuner(lora_type="lycoris"), partial=True)["values"]


def test_one_of_several_sizes_of_samples(tmp_path: Path) -> None:
    result = imported(tmp_path, tuner(validation_resolution="1024x1024,1280x768"))
    assert (result["values"]["sample.width"], result["values"]["sample.height"]) == (1024, 1024)
    assert "also at 1280x768" in " ".join(result["listed"])


ATTENTION = ["to_k", "to_q", "to_v", "to_out.0"]
FLUX2 = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"]


@pytest.mark.parametrize(
    ("tuned", "family", "theirs"),
    [
        ("qwen_image", "qwenimage1", ATTENTION),
        ("flux2", "flux2", FLUX2),
        ("sd3", "sd3", ATTENTION),
        ("wan", "wan", ATTENTION),
        ("sdxl", "sdxl", ATTENTION),
        ("sd1x", "sd15", ATTENTION),
    ],
)
def test_its_usual_layers_are_those_that_its_names_mean(
    tmp_path: Path, tuned: str, family: str, theirs: list[str]
) -> None:
    """`DEFAULT_LORA_TARGET` of helpers/models/*/model.py, which PEFT takes for ends of diffusers' paths: none of those
    of the text in a joint attention. The model's own layers are those of its LoRA files."""
    own = imported(tmp_path, tuner(model_family=tuned, pretrained_model_name_or_path="b.safetensors"))
    modules = FAMILIES[family].lora_names().components[0].modules
    meant = {n for n, paths in modules.items() if any(p.endswith(tuple(f".{t}" for t in theirs)) for p in paths)}
    model = FAMILIES[family].declared(FAMILIES[family].published[FAMILIES[family].small](), NOTHING_NAMED)
    globs = [glob for one in own["values"]["lora.targets"] for glob in model.presets.get(one, (one,))]
    assert {n for n in modules if any(fnmatchcase(n, glob) for glob in globs)} == meant
