"""Qwen-Image 2.1's networks from its files. Its text encoder is the text half of Qwen3-VL-8B."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.qwenimage import keys, vae
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.transformer import QwenImage
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import VL_THETA, Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower

_NETWORKS: Final = built_by(
    transformer=(QwenImage, QwenImageArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=vae.PUBLISHED)),
    vision=(VisionTower, VisionArch.from_shapes),
    text_encoder=(Qwen3, partial(Qwen3Arch.from_shapes, theta=VL_THETA)),
)
_ALONE: Final = {"qwen3-vl-8b": "text_encoder"}
QWENIMAGE_FILES: Final = FamilyFiles("qwenimage", keys.COMPONENTS, keys.resolve, _ALONE, _NETWORKS)
