"""Chroma and diffusers': captions of several lengths."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.models.chroma.names import transformer_to_diffusers
from flame_train.models.chroma.transformer import Chroma, ChromaArch, places
from tests.parity.twins.twin import ALL, Twin, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = ChromaArch(width=48, depth=2, single_depth=2, head_dim=16, channels=4, context_dim=24, hidden=40, layers=2)
ROWS = (3, 7)
TEXT = 8


def reference(arch):
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


def patch(twin, arch):
    for embedding in (twin.time_text_embed.time_proj, twin.time_text_embed.guidance_proj):
        embedding.forward = sinusoids(16)
    twin.time_text_embed.mod_proj = fp64(places(arch.modulations))


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    shape = (2, 8, 6, 4)
    return {
        "latents": rng.standard_normal(shape).astype(dtype),
        "timesteps": np.array([3.0, 875.0], np.float32),
        "context": rng.standard_normal((2, TEXT, 24)).astype(dtype),
        "rows": np.array(ROWS, np.int32),
        "weight": rng.standard_normal(shape).astype(dtype),
    }


def ours(model, batch, latents=None):
    return model(*given(batch, latents, "timesteps", "context", "rows"))


def theirs(twin, batch, weights=None, latents=None):
    """Packed and unpacked by the pipeline's own functions, with the mask of booleans that attention takes as one."""
    x = (fp64(batch["latents"]) if latents is None else latents).permute(0, 3, 1, 2)
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


TWIN = Twin(
    Chroma,
    {"": ARCH},
    transformer_to_diffusers(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"": (3 + 2 + 2 * 2 + 2 * 8 + 2 * 2, ALL)},  # of all linear layers, those of the approximator among them
)
