"""Wan 2.2 and diffusers': a still, a film, and a film of whose frames each has a time of its own."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.models.wan.names import transformer_to_diffusers
from flame_train.models.wan.transformer import Wan, WanArch
from tests.parity.twins.twin import ALL, Twin, always_fp64, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = WanArch(width=48, depth=2, head_dim=24, hidden=64, channels=4, text_dim=20)
FRAMES = {"": 1, "film": 3, "times": 2}


def reference(arch):
    return diffusers.WanTransformer3DModel(
        in_channels=arch.channels,
        out_channels=arch.channels,
        num_attention_heads=arch.width // arch.head_dim,
        attention_head_dim=arch.head_dim,
        num_layers=arch.depth,
        ffn_dim=arch.hidden,
        text_dim=arch.text_dim,
    )


def patch(twin, arch):
    twin.condition_embedder.timesteps_proj.forward = sinusoids(256)


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    shape = (2, FRAMES[variant], 6, 4, arch.channels)
    times = np.array([[3.0, 0.0], [875.0, 12.0]] if variant == "times" else [3.0, 875.0], np.float32)
    return {
        "latents": rng.standard_normal(shape).astype(dtype),
        "times": times,
        "context": rng.standard_normal((2, 7, arch.text_dim)).astype(dtype),
        "weight": rng.standard_normal(shape).astype(dtype),
    }


def ours(model, batch, latents=None):
    return model(*given(batch, latents, "times", "context"))


def theirs(twin, batch, weights=None, latents=None):
    x = fp64(batch["latents"]) if latents is None else latents
    tokens = x.shape[2] * x.shape[3] // 4
    times = fp64(batch["times"])
    call = {
        "hidden_states": x.permute(0, 4, 1, 2, 3),
        "timestep": times.repeat_interleave(tokens, dim=1) if times.ndim == 2 else times,
        "encoder_hidden_states": fp64(batch["context"]),
        "return_dict": False,
    }
    return torch.func.functional_call(twin, weights or {}, kwargs=call)[0].permute(0, 2, 3, 4, 1)


TWIN = Twin(
    Wan,
    {"": ARCH},
    transformer_to_diffusers(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"": (26, ALL), "film": (26, ("off",)), "times": (26, ("off",))},  # 10 layers a block, 6 around them
    exact=always_fp64,
)
