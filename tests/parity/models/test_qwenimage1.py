"""Qwen-Image 1 against diffusers': predictions, and the gradients of every LoRA matrix, with two captions."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.models.qwenimage1.names import base_modules, transformer_table
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from tests.parity.models.lora_gradients import fp64, latents_gradient_error, lora_gradient_errors, merged_in_torch

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

TO_DIFFUSERS = transformer_table()
ARCH = QwenImage1Arch(width=64, depth=2, head_dim=16, channels=4, text_dim=24, axes=(4, 6, 6))
SIZE = (8, 6)
LENGTHS = (5, 9)  # of 9 rows
LINEAR = 6 + 14 * 2 - 4  # what stands once, and fourteen layers a block
# what the last block makes of the text goes nowhere
UNUSED = tuple(f"transformer_blocks.1.{n}" for n in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net"))


def diffusers_qwenimage1(arch):
    return diffusers.QwenImageTransformer2DModel(
        in_channels=4 * arch.channels,
        out_channels=arch.channels,
        num_layers=arch.depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.text_dim,
        axes_dims_rope=arch.axes,
    )


@pytest.fixture
def dtype():
    """fp32 alone: diffusers' rotary angles are computed in it, so no smaller difference can be measured."""
    return "float32"


@pytest.fixture(autouse=True)
def in_fp64(monkeypatch):
    """diffusers normalises and turns in fp32 whatever is given, which would hide what is measured here."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture
def batch(dtype):
    rng = np.random.default_rng(1)
    mask = np.arange(9)[None] < np.array(LENGTHS)[:, None]
    return {
        "latents": rng.standard_normal((2, *SIZE, 4)).astype(dtype),
        "times": np.array([0.03, 0.875], np.float32),
        "states": (rng.standard_normal((2, 9, 24)) * mask[..., None]).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal((2, *SIZE, 4)).astype(dtype),
    }


def ours(model, batch, latents=None):
    x = tensor(batch["latents"]) if latents is None else latents
    return model(x, *(tensor(batch[name]) for name in ("times", "states", "rows")))


def theirs(twin, batch, weights=None, latents=None):
    """The pipeline packs squares of latents with the channels first."""
    (height, width), (B, T, _) = SIZE, batch["states"].shape
    x = fp64(batch["latents"]) if latents is None else latents
    x = x.permute(0, 3, 1, 2).reshape(B, 4, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    call = {
        "hidden_states": x.reshape(B, height * width // 4, 16),
        "encoder_hidden_states": fp64(batch["states"]),
        "encoder_hidden_states_mask": torch.arange(T)[None] < torch.from_numpy(batch["rows"])[:, None],
        "timestep": fp64(batch["times"]),
        "img_shapes": [[(1, height // 2, width // 2)]] * B,
        "return_dict": False,
    }
    made = torch.func.functional_call(twin, weights or {}, kwargs=call)[0]
    made = made.reshape(B, height // 2, width // 2, 4, 2, 2).permute(0, 1, 4, 2, 5, 3)
    return made.reshape(B, height, width, 4)


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(QwenImage1(ARCH), dtype)
    twin = fill(model, diffusers_qwenimage1(ARCH), TO_DIFFUSERS)
    twin.requires_grad_(False)

    def embedded(times, states, more=None):
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
    attached = with_lora(model, [name for name in base_modules(2) if not name.startswith(UNUSED)])
    model.checkpointing = checkpointing
    leaves, weights = merged_in_torch(twin, attached, TO_DIFFUSERS)
    out, expected = ours(model, batch), theirs(twin, batch, weights)
    assert off(out, expected.detach()) < bound

    errors = lora_gradient_errors(attached, leaves, out, expected, batch["weight"], off)
    assert len(errors) == 2 * LINEAR
    assert {name: e for name, e in errors.items() if not e < bound} == {}


def test_gradient_of_the_latents(pair, batch, bound, off):
    assert latents_gradient_error(pair, batch, ours, theirs, off) < bound
