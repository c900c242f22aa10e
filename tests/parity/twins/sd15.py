"""The UNets of Stable Diffusion 1 and 2, and diffusers'."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.engine import tensor
from flame_train.models.sdxl.names_unet import SD_LEVELS, unet_from_diffusers
from flame_train.models.sdxl.unet import UNet, UNetArch
from tests.parity.twins.sdxl import reference
from tests.parity.twins.twin import Twin, fp64, sinusoids, torch

FIRST = replace(UNetArch.tiny_sd1(16, 24), heads=2, eps=1e-3)  # an eps as no published model has it must arrive
TO_DIFFUSERS = unet_from_diffusers(SD_LEVELS).inverse
ARCHS = {"v1": FIRST, "v2": replace(FIRST, heads=0, head_dim=8, linear_projections=True)}


def patch(twin, arch):
    twin.time_proj.forward = sinusoids(arch.model_channels)


def inputs(arch, dtype, variant):
    rng = np.random.default_rng(1)
    return {
        "latents": rng.standard_normal((2, 16, 8, 4)).astype(dtype),
        "timesteps": np.array([3.0, 871.0], np.float32),
        "context": rng.standard_normal((2, 7, 24)).astype(dtype),
        "weight": rng.standard_normal((2, 16, 8, 4)).astype(dtype),
    }


def ours(model, batch, latents=None):
    x = tensor(batch["latents"]) if latents is None else latents
    return model(x, tensor(batch["timesteps"]), tensor(batch["context"]))


def theirs(twin, batch, weights=None, latents=None):
    x = fp64(batch["latents"]) if latents is None else latents
    call = {
        "sample": x.permute(0, 3, 1, 2),
        "timestep": torch.from_numpy(batch["timesteps"]),
        "encoder_hidden_states": fp64(batch["context"]),
    }
    return torch.func.functional_call(twin, weights or {}, kwargs=call).sample.permute(0, 2, 3, 1)


TWIN = Twin(
    UNet,
    ARCHS,
    TO_DIFFUSERS,
    reference,
    patch,
    inputs,
    ours,
    theirs,
    {"": (278, ("off", "full"))},
    layers=lambda model, variant: resolve(model, ["full"], UNET_PRESETS),
)
