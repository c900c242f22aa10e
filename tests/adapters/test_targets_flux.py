"""Flux's presets against the published lists of LoRA modules."""

from __future__ import annotations

import pytest

from flame_train.adapters.targets import resolve
from flame_train.models.flux.family import PRESETS
from flame_train.models.flux.names import lora_family
from flame_train.models.flux.transformer import Flux, FluxArch
from tests.golden_keys import golden


@pytest.fixture(scope="module")
def model():
    return Flux(FluxArch.dev())


def natives(target_set):
    """The native modules that PEFT's list reaches, the last projection left out: it is in no block."""
    keys = golden("lora_peft_flux")[target_set]
    reached = {key.removeprefix("transformer.").rsplit(".", 2)[0] for key in keys} - {"proj_out"}
    return {module for module, paths in lora_family().components[0].modules.items() if reached & paths.keys()}


@pytest.mark.parametrize(
    ("preset", "target_set", "count"),
    [("attention", "attention", 114), ("attention+mlp", "attention_ff_single", 228)],
)
def test_presets_are_the_modules_of_the_diffusers_examples(model, preset, target_set, count):
    found = resolve(model, [preset], PRESETS)
    assert len(found) == count
    assert set(found) == natives(target_set)


def test_full_is_what_sd_scripts_trains(model):
    lines = golden("lora_kohya_flux")
    expected = {m["base"].removesuffix(".weight") for name, m in lines.items() if name.startswith("lora_unet")}
    found = resolve(model, ["full"], PRESETS)
    assert len(found) == 304
    assert set(found) == expected
