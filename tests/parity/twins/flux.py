"""Flux.1 and diffusers': with guidance and without, alone and with a control image of another size, as Kontext's."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.flux.names import transformer_to_diffusers
from flame_train.models.flux.transformer import Flux, FluxArch
from tests.parity.twins.twin import Twin, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

TO_DIFFUSERS = transformer_to_diffusers()
SIZES = {
    "width": 64,
    "depth": 2,
    "single_depth": 2,
    "head_dim": 16,
    "channels": 4,
    "context_dim": 24,
    "pooled_dim": 20,
}


def reference(arch):
    return diffusers.FluxTransformer2DModel(
        in_channels=4 * arch.channels,
        num_layers=arch.depth,
        num_single_layers=arch.single_depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.context_dim,
        pooled_projection_dim=arch.pooled_dim,
        guidance_embeds=arch.guidance,
        axes_dims_rope=arch.axes,
    )


def patch(twin, arch):
    twin.time_text_embed.time_proj.forward = sinusoids(256)


def exact(monkeypatch):
    """diffusers turns queries and keys in fp32 whatever they are, which would hide what is measured here."""
    from diffusers.models.transformers import transformer_flux

    def rotated(x, freqs_cis, sequence_dim):
        assert sequence_dim == 1
        cos, sin = (part[None, :, None] for part in freqs_cis)
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
        return x * cos + turned * sin

    def angles(self, ids):
        axes = []
        for i, dim in enumerate(self.axes_dim):
            freqs = self.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            axes.append(torch.outer(ids[:, i].double(), freqs).repeat_interleave(2, dim=1))
        return torch.cat(axes, dim=1).cos(), torch.cat(axes, dim=1).sin()

    monkeypatch.setattr(transformer_flux, "apply_rotary_emb", rotated)
    monkeypatch.setattr(transformer_flux.FluxPosEmbed, "forward", angles)


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    batch = {
        "latents": rng.standard_normal((2, 8, 6, 4)).astype(dtype),
        "timesteps": np.array([3.0, 875.0], np.float32),
        "context": rng.standard_normal((2, 5, 24)).astype(dtype),
        "pooled": rng.standard_normal((2, 20)).astype(dtype),
        "guidance": np.array([1.0, 3.5], np.float32),
        "weight": rng.standard_normal((2, 8, 6, 4)).astype(dtype),
    }
    control = np.random.default_rng(2).standard_normal((2, 4, 10, 4)).astype(dtype)
    return batch | ({"controls": [control]} if variant == "edited" else {})


def ours(model, batch, latents=None):
    guidance = tensor(batch["guidance"]) if model.arch.guidance else None
    controls = [tensor(each) for each in batch.get("controls", ())]
    return model(*given(batch, latents, "timesteps", "context", "pooled"), guidance, controls)


def theirs(twin, batch, weights=None, latents=None):
    """Packed and unpacked by the functions of the pipelines, which Kontext's has too."""
    x = (fp64(batch["latents"]) if latents is None else latents).permute(0, 3, 1, 2)
    B, _, H, W = x.shape
    pipeline, images = diffusers.FluxKontextPipeline, [x]
    images += [fp64(each).permute(0, 3, 1, 2) for each in batch.get("controls", ())]
    ids = []
    for number, image in enumerate(images):
        ids.append(
            pipeline._prepare_latent_image_ids(B, image.shape[2] // 2, image.shape[3] // 2, "cpu", torch.float64)
        )
        ids[-1][..., 0] = number
    call = {
        "hidden_states": torch.cat([pipeline._pack_latents(each, *each.shape) for each in images], dim=1),
        "timestep": fp64(batch["timesteps"]) / 1000,
        "encoder_hidden_states": fp64(batch["context"]),
        "pooled_projections": fp64(batch["pooled"]),
        "guidance": fp64(batch["guidance"]) if twin.config.guidance_embeds else None,
        "img_ids": torch.cat(ids),
        "txt_ids": torch.zeros(batch["context"].shape[1], 3, dtype=torch.float64),
    }
    out = torch.func.functional_call(twin, weights or {}, kwargs=call).sample
    return pipeline._unpack_latents(out[:, : H * W // 4], H * 8, W * 8, 8).permute(0, 2, 3, 1)


TWIN = Twin(
    Flux,
    {"dev": FluxArch(**SIZES, guidance=True), "schnell": FluxArch(**SIZES, guidance=False)},
    TO_DIFFUSERS,
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"alone": (None, ("off",)), "edited": (None, ("off",))},
    ("float32", "float64"),
    exact,
)
