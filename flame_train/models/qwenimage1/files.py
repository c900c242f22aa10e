"""Qwen-Image 1's networks from its files. Its text encoder is the text half of Qwen2.5-VL-7B."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.qwenimage1 import keys
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

_NETWORKS: Final = built_by(
    transformer=(QwenImage1, QwenImage1Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.qwen_image())),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
)
_ALONE: Final = {"qwen2.5-vl-7b": "text_encoder"}
QWENIMAGE1_FILES: Final = FamilyFiles("qwenimage1", keys.COMPONENTS, keys.resolve, _ALONE, _NETWORKS)
