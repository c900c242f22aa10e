"""Qwen-Image 2.1 against diffusers': predictions, and the gradients of every LoRA matrix, with two captions."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.names import transformer_to_diffusers
from flame_train.models.qwenimage.transformer import QwenImage
from tests.parity.models.lora_gradients import fp64, latents_gradient_error, lora_gradient_errors, merged_in_torch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

TO_DIFFUSERS = transformer_to_diffusers()
ARCH = QwenImageArch(width=64, depth=2, head_dim=16, hidden=192, channels=6, text_dim=24, axes=(4, 6, 6))
SIZE = (4, 6)
LENGTHS = (5, 9)  # of 9 rows
LINEAR = 8 + 6 * 2  # what stands once, and six layers a block
SHOWN = {"none": [], "one image": [((2, 4), 3)], "two images": [((4, 2), 2), ((2, 2), 4)]}
"""Rows and columns of control images, and how many of the text's tokens stand before each."""


def diffusers_qwenimage(arch):
    return diffusers.QwenImage21Transformer2DModel(
        in_channels=arch.channels,
        out_channels=arch.channels,
        num_layers=arch.depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        context_in_dim=arch.text_dim,
        mlp_ratio=arch.hidden // arch.width,
        axes_dims_rope=arch.axes,
        eps=arch.eps,
    )


@pytest.fixture
def dtype():
    """fp32 alone: diffusers' rotary angles are computed in it, so no smaller difference can be measured."""
    return "float32"


@pytest.fixture(autouse=True)
def in_fp64(monkeypatch):
    """diffusers normalises and turns in fp32 whatever is given, which would hide what is measured here."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(params=SHOWN)
def batch(dtype, request):
    rng = np.random.default_rng(1)
    mask = np.arange(9)[None] < np.array(LENGTHS)[:, None]
    return {
        "latents": rng.standard_normal((2, *SIZE, 6)).astype(dtype),
        "times": np.array([0.03, 0.875], np.float32),
        "states": (rng.standard_normal((2, 9, 24)) * mask[..., None]).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal((2, *SIZE, 6)).astype(dtype),
        "shown": [(rng.standard_normal((2, *size, 6)).astype(dtype), start) for size, start in SHOWN[request.param]],
    }


def ours(model, batch, latents=None):
    x = tensor(batch["latents"]) if latents is None else latents
    controls, starts = [tensor(own) for own, _ in batch["shown"]], [start for _, start in batch["shown"]]
    return model(x, *(tensor(batch[name]) for name in ("times", "states", "rows")), controls, starts)


def theirs(twin, batch, weights=None, latents=None):
    """Caption by caption: in a batch the image's places would depend on the longest one, padding included."""
    (height, width), latents = SIZE, fp64(batch["latents"]) if latents is None else latents
    made = []
    for i, rows in enumerate(batch["rows"]):
        # an image's places in the text are a quarter of its tokens, and its states there are not read
        slots, states, begun = [], [], 0
        for own, start in [*batch["shown"], (batch["latents"], rows)]:
            places = own.shape[1] * own.shape[2] // 4
            slots += [False] * (start - begun) + [True] * places
            states += [batch["states"][i, begun:start], np.full((places, 24), 7.0)]
            begun = start
        images = [fp64(own[i : i + 1]).reshape(1, -1, 6) for own, _ in batch["shown"]]
        call = {
            "hidden_states": torch.cat([*images, latents[i : i + 1].reshape(1, height * width, -1)], dim=1),
            "encoder_hidden_states": fp64(np.concatenate(states[:-1])[None]),
            "timestep": fp64(batch["times"][i : i + 1]),
            "img_shapes": [[(1, *own.shape[1:3]) for own, _ in batch["shown"]] + [(1, height, width)]],
            "img_mask": torch.tensor([slots]),
            "return_dict": False,
        }
        found = torch.func.functional_call(twin, weights or {}, kwargs=call)[0]
        made.append(found[:, -height * width :].reshape(1, height, width, -1))
    return torch.cat(made)


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(QwenImage(ARCH), dtype)
    twin = fill(model, diffusers_qwenimage(ARCH), TO_DIFFUSERS)
    twin.requires_grad_(False)

    def embedded(times, states):
        """From our sinusoids: fp32 has a bit of 1e-4 at an angle of 1000; they are tested with the UNet."""
        angles = F.timestep_embedding(tensor(times.numpy().astype(np.float32)) * 1000.0, 256)
        return twin.time_text_embed.timestep_embedder(fp64(angles.numpy()))

    twin.time_text_embed.forward = embedded
    return model, twin


def test_prediction(pair, batch, bound, off):
    model, twin = pair
    assert off(ours(model, batch), theirs(twin, batch)) < bound


def test_a_batch_of_any_padding_predicts_the_same(pair, batch, bound, off):
    """What stands at the padding, and how much of it there is, does not matter."""
    model, _ = pair
    found = ours(model, batch)
    padding = np.arange(9)[None, :, None] >= np.array(LENGTHS)[:, None, None]
    noise = np.random.default_rng(9).standard_normal(batch["states"].shape) * padding
    longer = np.pad(batch["states"] + noise, ((0, 0), (0, 7), (0, 0))).astype(batch["states"].dtype)
    assert off(ours(model, batch | {"states": longer}), found.numpy()) < bound


@pytest.mark.parametrize("checkpointing", ["off", "mlp", "full"])
def test_every_lora_gradient(pair, batch, bound, off, with_lora, checkpointing):
    model, twin = pair
    attached = with_lora(model)
    model.checkpointing = checkpointing
    leaves, weights = merged_in_torch(twin, attached, TO_DIFFUSERS)
    out, expected = ours(model, batch), theirs(twin, batch, weights)
    assert off(out, expected.detach()) < bound

    errors = lora_gradient_errors(attached, leaves, out, expected, batch["weight"], off)
    assert len(errors) == 2 * LINEAR
    assert {name: e for name, e in errors.items() if not e < bound} == {}


def test_gradient_of_the_latents(pair, batch, bound, off):
    assert latents_gradient_error(pair, batch, ours, theirs, off) < bound
