"""Qwen-Image 1's networks from its files. Its text encoder is the text half of Qwen2.5-VL-7B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.qwenimage1 import keys
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return QwenImage1(QwenImage1Arch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.qwen_image(), stated))
    return Qwen3(Qwen3Arch.from_shapes(native, stated))


QWENIMAGE1_FILES: Final = FamilyFiles(
    "qwenimage1", keys.COMPONENTS, keys.resolve, {"qwen2.5-vl-7b": "text_encoder"}, _build
)
