"""Our name tables against diffusers' single-file converters, value by value, on every tensor of SDXL base."""

from __future__ import annotations

import types

import numpy as np
import pytest

from flame_train.models.sdxl import names as sdxl
from tests.golden_keys import golden
from tests.keymaps import Arrays

torch = pytest.importorskip("torch")
single_file = pytest.importorskip("diffusers.loaders.single_file_utils")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def checkpoint():
    """All names of the published file, each with its own random values; sizes shrunk in proportion."""
    rng = np.random.default_rng(0)
    return {
        name: torch.from_numpy(rng.standard_normal([n if n < 10 else max(n // 320, 2) for n in shape]))
        for name, shape in golden("sdxl_base_single_file").items()
        if "position_ids" not in name
    }


def native(part, tensors, only=None):
    """The component's native tensors as our tables read them from `tensors`."""
    found = sdxl.SDXL_FILES.resolve(tensors, only=only)
    assert part in found.sources
    arrays = Arrays({name: t.numpy() for name, t in tensors.items()})
    return {name: source.read(arrays) for name, source in found.sources[part].items()}


def check(part, checkpoint, converted):
    ours, theirs = native(part, checkpoint), native(part, converted, only=part)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_unet(checkpoint):
    config = {
        "layers_per_block": 2,
        "addition_embed_type": "text_time",
        "class_embed_type": None,
        "num_class_embeds": None,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    }
    converted = single_file.convert_ldm_unet_checkpoint(dict(checkpoint), config)
    assert len(converted) == 1680
    check("unet", checkpoint, converted)


def test_vae(checkpoint):
    config = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    converted = single_file.convert_ldm_vae_checkpoint(dict(checkpoint), config)
    assert len(converted) == 248
    check("vae", checkpoint, converted)


def test_second_text_encoder(checkpoint):
    width = len(checkpoint["conditioner.embedders.1.model.ln_final.weight"])
    model = types.SimpleNamespace(
        text_model=types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=width)), state_dict=dict
    )
    prefix = "conditioner.embedders.1.model."
    converted = single_file.convert_open_clip_checkpoint(model, dict(checkpoint), prefix=prefix)
    check("text_encoder_2", checkpoint, {name: v for name, v in converted.items() if "position_ids" not in name})
