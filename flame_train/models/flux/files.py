"""Flux's networks from its files. T5 has a separate loader (`loading_t5`), which finds it in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.clip import ClipArch, ClipTextEncoder
from flame_train.models.common.text.t5 import T5Arch, T5Encoder
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.flux import keys as flux
from flame_train.models.flux.transformer import Flux, FluxArch


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return Flux(FluxArch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.flux(), stated))
    if component == "text_encoder":
        return ClipTextEncoder(ClipArch.from_shapes(native, "quick_gelu", stated))
    return T5Encoder(T5Arch.from_shapes(native, stated))


_ALONE: Final = {"clip-l": "text_encoder", "t5-xxl": "text_encoder_2"}
FLUX_FILES: Final = FamilyFiles("flux", flux.COMPONENTS, flux.resolve, _ALONE, _build)
