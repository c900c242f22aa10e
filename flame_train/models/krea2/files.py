"""Krea 2's networks from its files. Its text encoder is the text half of Qwen3-VL-4B."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.krea2 import keys
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.transformer import Krea2
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import VL_THETA, Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower

_NETWORKS: Final = built_by(
    transformer=(Krea2, Krea2Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.qwen_image())),
    vision=(VisionTower, VisionArch.from_shapes),
    text_encoder=(Qwen3, partial(Qwen3Arch.from_shapes, theta=VL_THETA)),
)
KREA2_FILES: Final = FamilyFiles("krea2", keys.COMPONENTS, keys.resolve, {"qwen3-vl-4b": "text_encoder"}, _NETWORKS)
