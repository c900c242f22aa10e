"""FLUX.3's networks from its files. Its text encoder is the text half of Qwen3-VL-4B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.qwen3 import VL_THETA, Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.flux3 import keys
from flame_train.models.flux3.transformer import Flux3, Flux3Arch


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return Flux3(Flux3Arch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.flux2(), stated))
    return Qwen3(Qwen3Arch.from_shapes(native, stated, VL_THETA))


FLUX3_FILES: Final = FamilyFiles("flux3", keys.COMPONENTS, keys.resolve, {"qwen3-vl-4b": "text_encoder"}, _build)
