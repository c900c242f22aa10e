"""Flux's networks from its files. T5 has a separate loader (`loading_t5`), which finds it in any layout."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.flux import keys as flux
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_NETWORKS: Final = built_by(
    transformer=(Flux, FluxArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux())),
    text_encoder=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="quick_gelu")),
    text_encoder_2=(T5Encoder, T5Arch.from_shapes),
)
_ALONE: Final = {"clip-l": "text_encoder", "t5-xxl": "text_encoder_2"}
FLUX_FILES: Final = FamilyFiles("flux", flux.COMPONENTS, flux.resolve, _ALONE, _NETWORKS)
