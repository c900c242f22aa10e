"""FLUX.2 klein, dev and diffusers': alone, and with two control images of other sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.flux2.names import transformer_to_diffusers
from flame_train.models.flux2.transformer import Flux2, Flux2Arch
from tests.parity.twins.twin import ALL, Twin, fp64, given, sinusoids, torch

diffusers = pytest.importorskip("diffusers")
ARCH = Flux2Arch(width=64, depth=2, single_depth=3, head_dim=16, mlp=192, channels=16, context_dim=24)


def reference(arch):
    return diffusers.Flux2Transformer2DModel(
        in_channels=arch.channels,
        num_layers=arch.depth,
        num_single_layers=arch.single_depth,
        attention_head_dim=arch.head_dim,
        num_attention_heads=arch.width // arch.head_dim,
        joint_attention_dim=arch.context_dim,
        axes_dims_rope=arch.axes,
        guidance_embeds=arch.guidance,
    )


def patch(twin, arch):
    twin.time_guidance_embed.time_proj.forward = sinusoids(256)


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    batch = {
        "latents": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
        "timesteps": np.array([3.0, 875.0], np.float32),
        "context": rng.standard_normal((2, 5, 24)).astype(dtype),
        "weight": rng.standard_normal((2, 4, 3, 16)).astype(dtype),
    }
    batch |= {"guidance": np.array([1.0, 4.0], np.float32)} if arch.guidance else {}
    rng = np.random.default_rng(2)
    controls = [rng.standard_normal((2, *size, 16)).astype(dtype) for size in ((3, 5), (4, 2))]
    return batch | ({"controls": controls} if variant == "edited" else {})


def ours(model, batch, latents=None):
    controls = [tensor(each) for each in batch.get("controls", ())]
    told = tensor(batch["guidance"]) if "guidance" in batch else None
    return model(*given(batch, latents, "timesteps", "context"), controls, told)


def theirs(twin, batch, weights=None, latents=None):
    """Packed by the pipeline's own functions."""
    x = (fp64(batch["latents"]) if latents is None else latents).permute(0, 3, 1, 2)
    pipeline = diffusers.Flux2KleinPipeline
    context = fp64(batch["context"])
    beside = [fp64(each).permute(0, 3, 1, 2) for each in batch.get("controls", ())]
    ids = [pipeline._prepare_latent_ids(x)]
    if beside:
        ids.append(pipeline._prepare_image_ids([each[:1] for each in beside]).expand(len(x), -1, -1))
    call = {
        "hidden_states": torch.cat([pipeline._pack_latents(each) for each in (x, *beside)], dim=1),
        "timestep": fp64(batch["timesteps"]) / 1000,
        "guidance": fp64(batch["guidance"]) if "guidance" in batch else None,
        "encoder_hidden_states": context,
        "img_ids": torch.cat(ids, dim=1),
        "txt_ids": pipeline._prepare_text_ids(context),
    }
    out = torch.func.functional_call(twin, weights or {}, kwargs=call).sample
    return out[:, : x.shape[2] * x.shape[3]].reshape(batch["latents"].shape)


TWIN = Twin(
    Flux2,
    {"klein": ARCH, "dev": replace(ARCH, guidance=True)},
    transformer_to_diffusers(),
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"alone": (None, ALL), "edited": (None, ALL)},
)
