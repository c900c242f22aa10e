"""Krea 2's networks from its files. Its text encoder is the text half of Qwen3-VL-4B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.qwen3 import VL_THETA, Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.krea2 import keys
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.transformer import Krea2


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return Krea2(Krea2Arch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.qwen_image(), stated))
    return Qwen3(Qwen3Arch.from_shapes(native, stated, VL_THETA))


KREA2_FILES: Final = FamilyFiles("krea2", keys.COMPONENTS, keys.resolve, {"qwen3-vl-4b": "text_encoder"}, _build)
