"""Anima and diffusers'."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flame_train.models.anima.names import transformer_to_diffusers
from flame_train.models.anima.transformer import Anima, AnimaArch
from tests.parity.twins.twin import ALL, Twin, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = AnimaArch(width=48, depth=2, head_dim=24, hidden=96, channels=4, context_dim=20, rank=8)


def reference(arch):
    return diffusers.CosmosTransformer3DModel(
        in_channels=arch.channels,
        out_channels=arch.channels,
        num_attention_heads=arch.width // arch.head_dim,
        attention_head_dim=arch.head_dim,
        num_layers=arch.depth,
        mlp_ratio=arch.hidden / arch.width,
        text_embed_dim=arch.context_dim,
        adaln_lora_dim=arch.rank,
        rope_scale=arch.stretch,
        concat_padding_mask=True,
        extra_pos_embed_type=None,
    )


def patch(twin, arch):
    twin.time_embed.time_proj.forward = sinusoids(arch.width)


def without_torchvision(monkeypatch):
    """Replaces its one function that the class calls, which makes a mask of zeros smaller."""
    from diffusers.models.transformers import transformer_cosmos

    functional = SimpleNamespace(resize=lambda x, size, interpolation: torch.nn.functional.interpolate(x, size))
    made = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    monkeypatch.setattr(transformer_cosmos, "transforms", made, raising=False)


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 6, 4, 4)).astype(dtype),
        "times": np.array([0.003, 0.875], np.float32),
        "context": rng.standard_normal((2, 7, 20)).astype(dtype),
        "weight": rng.standard_normal((2, 6, 4, 4)).astype(dtype),
    }


def ours(model, batch, latents=None):
    return model(*given(batch, latents, "times", "context"))


def theirs(twin, batch, weights=None, latents=None):
    x = fp64(batch["latents"]) if latents is None else latents
    H, W = x.shape[1:3]
    call = {
        "hidden_states": x.permute(0, 3, 1, 2).unsqueeze(2),
        "timestep": fp64(batch["times"]),
        "encoder_hidden_states": fp64(batch["context"]),
        "padding_mask": torch.zeros(1, 1, 8 * H, 8 * W, dtype=torch.float64),
        "return_dict": False,
    }
    out = torch.func.functional_call(twin, weights or {}, kwargs=call)[0]
    return out.squeeze(2).permute(0, 2, 3, 1)


TWIN = Twin(
    Anima,
    {"": ARCH},
    transformer_to_diffusers(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"": (38, ALL)},
    exact=without_torchvision,
)
