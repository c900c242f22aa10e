"""Chroma's networks from its files. T5 has a separate loader (`loading_t5`), which finds it in any layout."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.chroma import keys
from flame_train.models.chroma.transformer import Chroma, ChromaArch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_NETWORKS: Final = built_by(
    transformer=(Chroma, ChromaArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux())),
    text_encoder=(T5Encoder, T5Arch.from_shapes),
)
CHROMA_FILES: Final = FamilyFiles("chroma", keys.COMPONENTS, keys.resolve, {"t5-xxl": "text_encoder"}, _NETWORKS)
