"""What `bench step` and `bench memory` measure: networks of true size, with all that a step of theirs needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from flame_train.engine import nn
from flame_train.errors import ConfigError
from flame_train.models.flux import Flux, FluxArch
from flame_train.models.mmdit_sd3 import Mmdit, MmditArch
from flame_train.models.unet_sdxl import UNet, UNetArch
from flame_train.models.vae import sample_latents
from flame_train.recipes.flow import CLIP_TOKENS, PATCH, FlowFamily
from flame_train.recipes.flux import FLUX
from flame_train.recipes.memory_sdxl import activation_bytes
from flame_train.recipes.sd3 import SD3
from flame_train.recipes.sdxl import SdxlFamily, as_denoiser
from flame_train.training.family import Denoiser, Family, Load

from .bench_flops import UNET_TEXT, Work, flux_work, mmdit_work, unet_work

_SD3_T5, _FLUX_T5 = 256, 512
_PIXELS = 8  # the side of what every published VAE makes one latent pixel of
SIZE_CONDITIONING = 6 * 256  # of the UNet's vector, what tells sizes and crops

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A network without weights, how the family calls it, what conditions it, and what a step of it costs.

    Picture sides are multiples of `grid`; `conditioning` is (network, pixels a side, pictures) -> arrays by name;
    `activations` predicts memory as `--dry-run` does.
    """

    family: Family
    build: Callable[[], Any]
    denoiser: Callable[[Any], Denoiser]
    targets: str
    grid: int
    latent_channels: int
    conditioning: Callable[[Any, int, int], Arrays]
    work: Callable[[Any, int], Work]
    activations: Callable[[Any, Load], int]


def find(name: str) -> Subject:
    """The subject of that name. Raises `ConfigError` for one that is not known."""
    if name not in SUBJECTS:
        raise ConfigError(f"bench: expected a model among {', '.join(SUBJECTS)}, got {name}")
    return SUBJECTS[name]


def normal(*shape: int) -> np.ndarray[Any, Any]:
    """Standard normal values, fp32, the same for the same shape."""
    return np.random.default_rng(list(shape)).standard_normal(shape, np.float32)


# ---- SDXL -----------------------------------------------------------------------------------------------------------


def _sizes(unet: UNet, resolution: int, size: int) -> Arrays:
    return {
        "context": normal(size, UNET_TEXT, unet.arch.context_dim),
        "pooled": normal(size, unet.arch.adm_in_channels - SIZE_CONDITIONING),
        "time_ids": np.tile(np.array([resolution, resolution, 0, 0, resolution, resolution], np.int32), (size, 1)),
    }


def _sdxl(arch: UNetArch) -> Subject:
    return Subject(
        SdxlFamily(), partial(UNet, arch), as_denoiser, "attention", _PIXELS * 2 ** (len(arch.channel_mult) - 1),
        arch.in_channels, _sizes, unet_work, activation_bytes,
    )  # fmt: skip


# ---- SD3 and Flux ---------------------------------------------------------------------------------------------------


def _flow_denoiser(family: FlowFamily, network: nn.Module) -> Denoiser:
    latents = partial(sample_latents, family.published_vae)
    return Denoiser(network, "transformer", family.denoise(network, 1.0), latents)


def _flow_bytes(family: FlowFamily, text: int, network: nn.Module, load: Load) -> int:
    return family.activations(network, text, load)


def _sd3_conditioning(mmdit: Mmdit, resolution: int, size: int) -> Arrays:
    wide = mmdit.arch.pooled_dim * 3 // 8  # CLIP-L's share of both CLIPs' width
    rest = mmdit.arch.pooled_dim - wide
    return {
        "clip_l": normal(size, CLIP_TOKENS, wide), "clip_g": normal(size, CLIP_TOKENS, rest),
        "t5": normal(size, _SD3_T5, mmdit.arch.context_dim),
        "pooled_l": normal(size, wide), "pooled_g": normal(size, rest),
    }  # fmt: skip


def _flux_conditioning(flux: Flux, resolution: int, size: int) -> Arrays:
    return {"t5": normal(size, _FLUX_T5, flux.arch.context_dim), "pooled": normal(size, flux.arch.pooled_dim)}


def _sd3(arch: MmditArch) -> Subject:
    text = CLIP_TOKENS + _SD3_T5
    return Subject(
        SD3, partial(Mmdit, arch), partial(_flow_denoiser, SD3), "attention", _PIXELS * PATCH, arch.channels,
        _sd3_conditioning, partial(mmdit_work, text=text), partial(_flow_bytes, SD3, text),
    )  # fmt: skip


def _flux(arch: FluxArch) -> Subject:
    return Subject(
        FLUX, partial(Flux, arch), partial(_flow_denoiser, FLUX), "attention+mlp", _PIXELS * PATCH, arch.channels,
        _flux_conditioning, partial(flux_work, text=_FLUX_T5), partial(_flow_bytes, FLUX, _FLUX_T5),
    )  # fmt: skip


SUBJECTS: Final[Mapping[str, Subject]] = {
    "sdxl": _sdxl(UNetArch.sdxl()),
    "sd35-medium": _sd3(MmditArch.sd35_medium()),
    "sd35-large": _sd3(MmditArch.sd35_large()),
    "flux-dev": _flux(FluxArch.dev()),
    "sdxl-tiny": _sdxl(UNetArch.tiny()),
    "sd3-tiny": _sd3(MmditArch.tiny()),
    "flux-tiny": _flux(FluxArch.tiny()),
}
"""By name. The tiny ones have the true structure and are for a quick look."""
