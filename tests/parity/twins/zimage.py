"""Z-Image and diffusers': images of 12 tokens, which are filled up to 32, or of 32; captions of several lengths."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.models.zimage.names import transformer_to_diffusers
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from tests.parity.twins.twin import Twin, always_fp64, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

ARCH = ZImageArch(
    width=48,
    depth=2,
    refiners=1,
    head_dim=16,
    hidden=128,
    channels=4,
    context_dim=24,
    time_dim=48,
    time_hidden=1024,
    axes=(4, 6, 6),
)
LENGTHS = (5, 33)  # the second is filled up to 64 places
SIZES = {"filled": (8, 6), "whole": (8, 16)}


def reference(arch):
    return diffusers.ZImageTransformer2DModel(
        in_channels=arch.channels,
        dim=arch.width,
        n_layers=arch.depth,
        n_refiner_layers=arch.refiners,
        n_heads=arch.width // arch.head_dim,
        n_kv_heads=arch.width // arch.head_dim,
        cap_feat_dim=arch.context_dim,
        rope_theta=arch.theta,
        axes_dims=list(arch.axes),
        axes_lens=[128, 32, 32],
    )


def patch(twin, arch):
    twin.t_embedder.timestep_embedding = lambda t, dim: sinusoids(dim)(t)


def exact(monkeypatch):
    from diffusers.models.transformers.transformer_z_image import RopeEmbedder

    def turns(dim, end, theta):
        each = [
            torch.outer(torch.arange(e).double(), theta ** (-torch.arange(0, d, 2).double() / d))
            for d, e in zip(dim, end, strict=True)
        ]
        return [torch.polar(torch.ones_like(x), x) for x in each]

    monkeypatch.setattr(
        RopeEmbedder, "precompute_freqs_cis", staticmethod(lambda dim, end, theta: turns(dim, end, theta))
    )
    always_fp64(monkeypatch)


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    shape = (2, *SIZES[variant], 4)
    mask = np.arange(40)[None] < np.array(LENGTHS)[:, None]
    return {
        "latents": rng.standard_normal(shape).astype(dtype),
        "times": np.array([3.0, 875.0], np.float32),
        "context": (rng.standard_normal((2, 40, 24)) * mask[..., None]).astype(dtype),
        "rows": np.array(LENGTHS, np.int32),
        "weight": rng.standard_normal(shape).astype(dtype),
    }


def ours(model, batch, latents=None):
    return model(*given(batch, latents, "times", "context", "rows"))


def theirs(twin, batch, weights=None, latents=None):
    x = fp64(batch["latents"]) if latents is None else latents
    images = [image.permute(2, 0, 1).unsqueeze(1) for image in x]
    captions = [fp64(text[:n]) for text, n in zip(batch["context"], LENGTHS, strict=True)]
    call = {"x": images, "t": fp64(batch["times"]) / 1000, "cap_feats": captions, "return_dict": False}
    made = torch.func.functional_call(twin, weights or {}, kwargs=call)[0]
    return torch.stack([image.squeeze(1).permute(1, 2, 0) for image in made])


TWIN = Twin(
    ZImage,
    {"": ARCH},
    transformer_to_diffusers(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"filled": (29, ("off", "mlp")), "whole": (29, ("full",))},
    exact=exact,
    padded=("context", 60),
)
