"""SDXL's UNet and diffusers'."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.torch_models import unet_arguments
from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.engine import tensor
from flame_train.models.sdxl.names_unet import UNetLevels, unet_from_diffusers
from flame_train.models.sdxl.unet import UNet, UNetArch, vector_conditioning
from tests.parity.twins.twin import Twin, fp64, sinusoids, torch

diffusers = pytest.importorskip("diffusers")

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


def reference(arch):
    return diffusers.UNet2DConditionModel(**unet_arguments(arch))


def patch(twin, arch):
    twin.time_proj.forward = sinusoids(arch.model_channels)
    twin.add_time_proj.forward = sinusoids(256)


def inputs(arch, dtype, variant):
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


TWIN = Twin(
    UNet,
    {"": ARCH},
    TO_DIFFUSERS,
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"": (None, ("off",))},
    ("float32", "float64"),
    layers=lambda model, variant: resolve(model, ["full"], UNET_PRESETS),
)
