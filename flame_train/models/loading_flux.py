"""Flux's networks from its files. T5 has a loader of its own (`loading_t5`) that finds it anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flame_train.engine import nn
from flame_train.engine.dtype import DType
from flame_train.io.keymap import Shape

from .clip import ClipArch, ClipTextEncoder
from .family_files import FamilyFiles
from .flux import Flux, FluxArch
from .keys import flux
from .t5 import T5Arch, T5Encoder
from .vae import Vae, VaeArch


def _build(component: str, native: Mapping[str, Shape]) -> nn.Module:
    if component == "transformer":
        return Flux(FluxArch.from_shapes(native))
    if component == "vae":
        published = VaeArch.flux()
        return Vae(VaeArch.from_shapes(native, published.scaling_factor, published.shift_factor))
    if component == "text_encoder":
        return ClipTextEncoder(ClipArch.from_shapes(native, "quick_gelu"))
    return T5Encoder(T5Arch.from_shapes(native))


FLUX_FILES: Final = FamilyFiles(
    "flux", flux.COMPONENTS, flux.resolve, {"clip-l": "text_encoder", "t5-xxl": "text_encoder_2"}, _build
)


def load_transformer(path: str | Path, *, device: str, dtype: DType | str, check_finite: bool = True) -> Flux:
    """The transformer, from a single file, a checkpoint, its diffusers folder or the whole one."""
    made = FLUX_FILES.load(path, "transformer", device=device, dtype=dtype, check_finite=check_finite)
    assert isinstance(made, Flux)
    return made


def load_vae(path: str | Path, *, device: str, dtype: DType | str = "float32") -> Vae:
    """The autoencoder, from `ae.safetensors`, a checkpoint or a diffusers folder; with Flux's scale and shift."""
    made = FLUX_FILES.load(path, "vae", device=device, dtype=dtype)
    assert isinstance(made, Vae)
    return made


def load_clip(path: str | Path, *, device: str, dtype: DType | str) -> ClipTextEncoder:
    """CLIP-L without its projection, from a file of its own, a checkpoint or a diffusers folder."""
    made = FLUX_FILES.load(path, "text_encoder", device=device, dtype=dtype)
    assert isinstance(made, ClipTextEncoder)
    return made
