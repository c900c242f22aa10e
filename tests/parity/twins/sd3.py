"""SD3's transformers and diffusers'."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import mmdit_to_diffusers
from tests.parity.twins.twin import Twin, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCHS = {
    "sd3-medium": MMDiTArch.tiny(qk_norm=False, dual=()),
    "sd35-medium": MMDiTArch.tiny(),
    "sd35-large": MMDiTArch.tiny(dual=()),
}


def reference(arch):
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=arch.channels,
        num_layers=arch.depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.context_dim,
        caption_projection_dim=arch.width,
        pooled_projection_dim=arch.pooled_dim,
        out_channels=arch.channels,
        pos_embed_max_size=arch.positions,
        dual_attention_layers=arch.dual,
        qk_norm="rms_norm" if arch.qk_norm else None,
    )


def patch(twin, arch):
    twin.time_text_embed.time_proj.forward = sinusoids(256)
    for part in twin.modules():
        if isinstance(part, diffusers.models.normalization.RMSNorm):
            part.forward = partial(exact_rms_norm, part)


def exact_rms_norm(part, x):
    """diffusers takes the mean of squares in fp32, whatever its input."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + part.eps) * part.weight


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 12, 8, 16)).astype(dtype),
        "timesteps": np.array([3.0, 871.0], np.float32),
        "context": rng.standard_normal((2, 7, arch.context_dim)).astype(dtype),
        "pooled": rng.standard_normal((2, arch.pooled_dim)).astype(dtype),
        "weight": rng.standard_normal((2, 12, 8, 16)).astype(dtype),
    }


def ours(model, batch, latents=None):
    return model(*given(batch, latents, "timesteps", "context", "pooled"))


def theirs(twin, batch, weights=None, latents=None):
    call = {
        "hidden_states": (fp64(batch["latents"]) if latents is None else latents).permute(0, 3, 1, 2),
        "timestep": torch.from_numpy(batch["timesteps"]),
        "encoder_hidden_states": fp64(batch["context"]),
        "pooled_projections": fp64(batch["pooled"]),
    }
    return torch.func.functional_call(twin, weights or {}, kwargs=call).sample.permute(0, 2, 3, 1)


TWIN = Twin(
    MMDiT,
    ARCHS,
    mmdit_to_diffusers(3),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"": (None, ("off",))},
    ("float32", "float64"),
)
