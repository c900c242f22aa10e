"""Presets against the published lists of LoRA modules, and globs."""

from __future__ import annotations

import pytest

from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.errors import ConfigError
from flame_train.models.sdxl.names_unet import unet_from_diffusers
from flame_train.models.sdxl.unet import UNet, UNetArch
from tests.golden_keys import golden


@pytest.fixture(scope="module")
def unet():
    return UNet(UNetArch.sdxl())


def peft_modules(target_set):
    """The native names of the layers that PEFT adapts."""
    keys = [key for key in golden("lora_peft_sdxl")[target_set] if key.endswith(".lora_A.weight")]
    there = [key.removeprefix("unet.").replace(".lora_A.weight", ".weight") for key in keys]
    return {name.removesuffix(".weight") for name in unet_from_diffusers().pull(there).sources}


@pytest.mark.parametrize(
    ("preset", "target_set", "count"),
    [("attention", "attention", 560), ("attention+mlp", "attention_ff", 700)],
)
def test_presets_are_the_modules_of_the_diffusers_examples(unet, preset, target_set, count):
    found = resolve(unet, [preset], UNET_PRESETS)
    assert len(found) == count
    assert set(found) == peft_modules(target_set)


def test_full_is_what_sd_scripts_trains_with_convolutions(unet):
    modules = golden("lora_kohya_sdxl_conv")
    bases = {m["base"] for name, m in modules.items() if name.startswith("lora_unet")}
    expected = {base.removeprefix("model.diffusion_model.").removesuffix(".weight") for base in bases}
    found = resolve(unet, ["full"], UNET_PRESETS)
    assert len(found) == 788
    assert set(found) == expected


def test_globs_and_presets_add_up_in_the_models_order_each_layer_once(unet):
    found = resolve(unet, ["*.attn2.to_k", "input_blocks.4.1.*", "input_blocks.4.1.proj_in"], UNET_PRESETS)
    names = [name for name, _ in unet.named_modules()]
    assert found == sorted(set(found), key=names.index)
    assert "output_blocks.5.1.transformer_blocks.1.attn2.to_k" in found
    assert "input_blocks.4.1.proj_in" in found
    assert "input_blocks.4.1.norm" not in found  # no layer that an adapter could sit in


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("atention", "attention"),
        ("*.attn1.to_qq", r"\*\.attn1\.to_q"),
        ("input_blocks.4.1.proj_inn", r"input_blocks\.4\.1\.proj_in"),
    ],
)
def test_a_target_without_layers_is_an_error_with_near_misses(unet, target, near):
    with pytest.raises(ConfigError, match=f"near it: .*{near}"):
        resolve(unet, ["attention", target], UNET_PRESETS)


def test_all_idle_targets_are_named_at_once(unet):
    with pytest.raises(ConfigError, match=r"(?s)'zzz'.*'\*\.norm1'"):
        resolve(unet, ["zzz", "attention", "*.norm1"], UNET_PRESETS)


def test_no_targets_is_an_error(unet):
    with pytest.raises(ConfigError, match="at least one target"):
        resolve(unet, [], UNET_PRESETS)
