"""Chroma against diffusers': predictions, and the gradient of every LoRA matrix, for captions of several lengths."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.models.chroma.names import transformer_to_diffusers
from flame_train.models.chroma.transformer import Chroma, ChromaArch, places

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::FutureWarning")]  # of its own attributes

TO_DIFFUSERS = transformer_to_diffusers()
ARCH = ChromaArch(width=48, depth=2, single_depth=2, head_dim=16, channels=4, context_dim=24, hidden=40, layers=2)
ROWS = (3, 7)
TEXT = 8


def diffusers_chroma(arch):
    twin = diffusers.ChromaTransformer2DModel(
        in_channels=4 * arch.channels,
        num_layers=arch.depth,
        num_single_layers=arch.single_depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.context_dim,
        axes_dims_rope=(4, 6, 6),
        approximator_hidden_dim=arch.hidden,
        approximator_layers=arch.layers,
    )
    for norm in twin.distilled_guidance_layer.norms:
        norm.eps = 1e-6  # of the published code; diffusers' class leaves it to PyTorch, which takes the dtype's
    return twin


@pytest.fixture
def dtype():
    return "float32"


@pytest.fixture
def batch(dtype):
    rng = np.random.default_rng(1)
    shape = (2, 8, 6, 4)
    return {
        "latents": rng.standard_normal(shape).astype(dtype),
        "timesteps": np.array([3.0, 875.0], np.float32),
        "context": rng.standard_normal((2, TEXT, 24)).astype(dtype),
        "rows": np.array(ROWS, np.int32),
        "weight": rng.standard_normal(shape).astype(dtype),
    }


def fp64(array):
    return torch.from_numpy(array.astype(np.float64))


def ours(model, batch):
    return model(*(tensor(batch[name]) for name in ("latents", "timesteps", "context", "rows")))


def theirs(twin, batch, weights=None):
    """Packed and unpacked by the pipeline's own functions, with the mask of booleans that attention takes as one."""
    x = fp64(batch["latents"]).permute(0, 3, 1, 2)
    B, C, H, W = x.shape
    pipeline = diffusers.ChromaPipeline
    seen = torch.arange(TEXT)[None] < torch.tensor(ROWS)[:, None]
    call = {
        "hidden_states": pipeline._pack_latents(x, B, C, H, W),
        "timestep": fp64(batch["timesteps"]) / 1000,
        "encoder_hidden_states": fp64(batch["context"]),
        "img_ids": pipeline._prepare_latent_image_ids(B, H // 2, W // 2, "cpu", torch.float64),
        "txt_ids": torch.zeros(TEXT, 3, dtype=torch.float64),
        "attention_mask": torch.cat([seen, torch.ones(B, H * W // 4, dtype=torch.bool)], dim=1),
    }
    out = torch.func.functional_call(twin, weights or {}, kwargs=call).sample
    return pipeline._unpack_latents(out, H * 8, W * 8, 8).permute(0, 2, 3, 1)


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(Chroma(ARCH), dtype)
    twin = fill(model, diffusers_chroma(ARCH), TO_DIFFUSERS)
    twin.requires_grad_(False)
    # our sinusoids: both make them in fp32, where a bit of a frequency is 1e-4 at t = 1000; tested with the UNet
    for embedding in (twin.time_text_embed.time_proj, twin.time_text_embed.guidance_proj):
        embedding.forward = lambda t: fp64(F.timestep_embedding(tensor(t.numpy().astype(np.float32)), 16).numpy())
    twin.time_text_embed.mod_proj = fp64(places(ARCH.modulations))
    return model, twin


def test_prediction(pair, batch, bound, off):
    model, twin = pair
    assert off(ours(model, batch), theirs(twin, batch)) < bound


def test_what_stands_at_the_padding_does_not_matter(pair, batch, bound, off):
    model, _ = pair
    found = ours(model, batch)
    padding = np.arange(TEXT)[None, :, None] >= np.array(ROWS)[:, None, None]
    other = {**batch, "context": np.where(padding, np.float32(100.0), batch["context"])}
    np.testing.assert_array_equal(ours(model, other).numpy(), found.numpy())
    seen = {**batch, "context": np.where(np.arange(TEXT)[None, :, None] == 2, 100.0, batch["context"]).astype("f4")}
    assert off(ours(model, seen), found.numpy()) > 1e-3


def test_the_sinusoid_of_the_modulations_is_that_of_diffusers():
    """To a bit of each frequency, which libraries round differently."""
    table = diffusers_chroma(ARCH).time_text_embed.mod_proj.numpy()
    found = places(ARCH.modulations)
    assert found.dtype == table.dtype == np.float32
    assert np.abs(found - table).max() < 1000 * ARCH.modulations * 2**-23


def merged_in_torch(twin, attached):
    """torch leaves for every LoRA matrix, and the twin's weights with the updates they make."""
    leaves, weights, there = {}, {}, dict(twin.named_parameters())
    for name, adapter in attached.adapters.items():
        down, up = (fp64(p.numpy()).requires_grad_() for p in (adapter.down, adapter.up))
        leaves[name] = (down, up)
        update = (adapter.alpha / adapter.rank) * (up @ down)
        for their_name, source in TO_DIFFUSERS.pull([f"{name}.weight"]).sources.items():
            weights[their_name] = there[their_name] + update[source.apply([np.arange(len(update))])]
    return leaves, weights


@pytest.mark.parametrize("checkpointing", ["off", "mlp", "full"])
def test_every_lora_gradient(pair, batch, bound, off, with_lora, checkpointing):
    """Of all linear layers, those of the approximator among them."""
    model, twin = pair
    attached = with_lora(model)
    model.checkpointing = checkpointing
    leaves, weights = merged_in_torch(twin, attached)
    out, expected = ours(model, batch), theirs(twin, batch, weights)
    assert off(out, expected.detach()) < bound

    (out * tensor(batch["weight"])).sum().backward()
    (expected * fp64(batch["weight"])).sum().backward()
    errors = {}
    for name, (down, up) in leaves.items():
        errors[f"{name} down"] = off(attached.adapters[name].down.grad, down.grad)
        errors[f"{name} up"] = off(attached.adapters[name].up.grad, up.grad)
    assert len(errors) == 2 * len(attached.adapters) == 2 * (3 + 2 + 2 * 2 + 2 * 8 + 2 * 2)
    assert {name: e for name, e in errors.items() if not e < bound} == {}
