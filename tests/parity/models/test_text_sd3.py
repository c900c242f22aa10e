"""SD3's text conditioning against diffusers' pipeline, on small encoders with random weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.sd3.mmdit import joined_context
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from tests.models.clip_windows import encode_windows

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity


def twin_of(model):
    a = model.arch
    config = transformers.CLIPTextConfig(
        hidden_size=a.width,
        intermediate_size=a.hidden,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        hidden_act=a.activation,
        projection_dim=a.projection or a.width,
        eos_token_id=49407,
        vocab_size=a.vocabulary,
    )
    twin = transformers.CLIPTextModelWithProjection(config).double()
    weights = {name: torch.from_numpy(t.numpy().astype(np.float64)) for name, t in model.weights()}
    without = {"text_projection.weight": torch.eye(a.width, dtype=torch.float64)}  # what diffusers puts there
    twin.load_state_dict(without | weights)
    return twin.eval()


class Tokens:
    """A tokenizer that gives the ids it was made with."""

    model_max_length = 77

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, *_, **__):
        return type("Batch", (), {"input_ids": torch.from_numpy(self.ids.astype(np.int64))})()


@pytest.mark.parametrize("projection", [None, 32], ids=["CLIP-L alone", "CLIP-L with its projection"])
def test_clips(projection, dtype, bound, off, scrambled):
    clip_l = scrambled(ClipTextEncoder(ClipArch.tiny("quick_gelu", projection)), dtype, 1)
    clip_g = scrambled(ClipTextEncoder(ClipArch.tiny("gelu", 48, width=48)), dtype, 2)
    ids = np.full((2, 77), 49407)
    ids[:, 0], ids[0, 1:5], ids[1, 1:9] = 49406, [320, 1125, 539, 320], np.arange(1000, 1008)
    padded_g = np.where(np.cumsum(ids == 49407, 1) > 1, 0, ids)
    for clip, rows in ((clip_l, ids), (clip_g, padded_g)):
        for found, expected in zip(
            encode_windows(clip, rows[:, None], unprojected=True), encoded(twin_of(clip), rows), strict=True
        ):
            assert off(found, expected) < bound


def encoded(twin, rows):
    """diffusers' way from ids to (hidden states, pooled text)."""
    pipe = SimpleNamespace(
        tokenizer=Tokens(rows),
        tokenizer_2=None,
        text_encoder=twin,
        text_encoder_2=None,
        tokenizer_max_length=77,
        _execution_device="cpu",
    )
    with torch.no_grad():
        return diffusers.StableDiffusion3Pipeline._get_clip_prompt_embeds(pipe, ["", ""], device="cpu")


def test_context_is_filled_up_and_joined():
    shapes = (2, 77, 8), (2, 77, 12), (2, 5, 32)
    clip_l, clip_g, t5 = (np.random.default_rng(i).standard_normal(s) for i, s in enumerate(shapes))
    found = joined_context(tensor(clip_l), tensor(clip_g), tensor(t5)).numpy()
    assert found.shape == (2, 82, 32)
    np.testing.assert_array_equal(found[:, :77, :8], clip_l)
    np.testing.assert_array_equal(found[:, :77, 8:20], clip_g)
    assert not found[:, :77, 20:].any()
    np.testing.assert_array_equal(found[:, 77:], t5)
