"""The UNet against diffusers': predictions, and the gradient of every LoRA matrix."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.torch_models import unet_arguments
from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.models.sdxl.names_unet import UNetLevels, unet_from_diffusers
from flame_train.models.sdxl.unet import UNet, UNetArch, vector_conditioning
from tests.parity.models.lora_gradients import fp64, latents_gradient_error, lora_gradient_errors

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.parity

ARCH = UNetArch(
    model_channels=16,
    transformer_depth=(0, 1, 2),
    context_dim=24,
    adm_in_channels=20 + 1536,
    head_dim=8,
    groups=4,
    eps=1e-3,  # as no published model has it, so that it must arrive
)
TO_DIFFUSERS = unet_from_diffusers(UNetLevels(2, (False, True, True))).inverse


@pytest.fixture
def batch(dtype):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 12, 8, 4)).astype(dtype),
        "timesteps": np.array([3.0, 871.0], np.float32),
        "context": rng.standard_normal((2, 7, 24)).astype(dtype),
        "pooled": rng.standard_normal((2, 20)).astype(dtype),
        "time_ids": np.array([[1024, 768, 0, 64, 1024, 1024], [333, 500, 12, 0, 896, 1152]], np.float32),
        "weight": rng.standard_normal((2, 12, 8, 4)).astype(dtype),
    }


def ours(model, batch, latents=None):
    vector = vector_conditioning(tensor(batch["pooled"]), tensor(batch["time_ids"]))
    x = tensor(batch["latents"]) if latents is None else latents
    return model(x, tensor(batch["timesteps"]), tensor(batch["context"]), vector)


def theirs(twin, batch, weights=None, latents=None):
    x = fp64(batch["latents"]) if latents is None else latents
    call = {
        "sample": x.permute(0, 3, 1, 2),
        "timestep": torch.from_numpy(batch["timesteps"]),
        "encoder_hidden_states": fp64(batch["context"]),
        "added_cond_kwargs": {
            "text_embeds": fp64(batch["pooled"]),
            "time_ids": torch.from_numpy(batch["time_ids"]),
        },
    }
    out = torch.func.functional_call(twin, weights or {}, kwargs=call)
    return out.sample.permute(0, 2, 3, 1)


def same_sinusoids(twin):
    """Gives the twin our sinusoids: both make them in fp32, where a bit of a frequency is 1e-4 at t = 1000.

    They have a test of their own.
    """

    def forward(dim):
        return lambda t: fp64(F.timestep_embedding(tensor(t.numpy()), dim).numpy())

    twin.time_proj.forward = forward(ARCH.model_channels)
    twin.add_time_proj.forward = forward(256)


@pytest.fixture
def pair(dtype, fill, scrambled):
    model = scrambled(UNet(ARCH), dtype)
    twin = fill(model, diffusers.UNet2DConditionModel(**unet_arguments(ARCH)), TO_DIFFUSERS)
    twin.requires_grad_(False)
    same_sinusoids(twin)
    return model, twin


@pytest.mark.parametrize("dim", [256, 320])
def test_sinusoids_are_as_near_to_the_formula_as_diffusers(dim):
    t = np.arange(2048, dtype=np.float32)
    args = t[:, None] * np.exp(-np.log(10000.0) * np.arange(dim // 2) / (dim // 2))
    exact = np.concatenate([np.cos(args), np.sin(args)], axis=1)
    embed = diffusers.models.embeddings.get_timestep_embedding
    theirs = embed(torch.from_numpy(t), dim, flip_sin_to_cos=True, downscale_freq_shift=0).numpy()
    found = F.timestep_embedding(tensor(t), dim).numpy()
    assert np.abs(found - exact).max() <= 2 * np.abs(theirs - exact).max()


def test_prediction(pair, batch, bound, off):
    model, twin = pair
    assert off(ours(model, batch), theirs(twin, batch)) < bound


def merged_in_torch(twin, attached):
    """torch leaves for every LoRA matrix, and the twin's weights with the updates they make."""
    leaves, weights, there = {}, {}, dict(twin.named_parameters())
    for name, adapter in attached.adapters.items():
        down, up = (fp64(p.numpy()).requires_grad_() for p in (adapter.down, adapter.up))
        leaves[name] = (down, up)
        [their_name] = TO_DIFFUSERS.pull([f"{name}.weight"]).sources
        base = there[their_name]
        update = (up.flatten(1) @ down.flatten(1)).reshape(base.shape)
        weights[their_name] = base + (adapter.alpha / adapter.rank) * update
    return leaves, weights


def test_every_lora_gradient(pair, batch, bound, off, with_lora):
    model, twin = pair
    attached = with_lora(model, resolve(model, ["full"], UNET_PRESETS))
    leaves, weights = merged_in_torch(twin, attached)
    out, expected = ours(model, batch), theirs(twin, batch, weights)
    assert off(out, expected.detach()) < bound

    errors = lora_gradient_errors(attached, leaves, out, expected, batch["weight"], off)
    assert len(errors) == 2 * len(resolve(model, ["full"], UNET_PRESETS))
    assert {name: e for name, e in errors.items() if not e < bound} == {}


def test_gradient_of_the_latents(pair, batch, bound, off):
    assert latents_gradient_error(pair, batch, ours, theirs, off) < bound
