"""Qwen-Image 2.1's networks from its files. Its text encoder is the text half of Qwen3-VL-8B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.qwen3 import VL_THETA, Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.qwenimage import keys, vae
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.transformer import QwenImage


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return QwenImage(QwenImageArch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, vae.PUBLISHED, stated))
    return Qwen3(Qwen3Arch.from_shapes(native, stated, VL_THETA))


QWENIMAGE_FILES: Final = FamilyFiles(
    "qwenimage", keys.COMPONENTS, keys.resolve, {"qwen3-vl-8b": "text_encoder"}, _build
)
