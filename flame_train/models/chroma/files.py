"""Chroma's networks from its files. T5 has a separate loader (`loading_t5`), which finds it in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.chroma import keys
from flame_train.models.chroma.transformer import Chroma, ChromaArch
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.t5 import T5Arch, T5Encoder
from flame_train.models.common.vae.vae import Vae, VaeArch


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return Chroma(ChromaArch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.flux(), stated))
    return T5Encoder(T5Arch.from_shapes(native, stated))


CHROMA_FILES: Final = FamilyFiles("chroma", keys.COMPONENTS, keys.resolve, {"t5-xxl": "text_encoder"}, _build)
