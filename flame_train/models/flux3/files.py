"""FLUX.3's networks from its files. Its text encoder is the text half of Qwen3-VL-4B."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.flux3 import keys
from flame_train.models.flux3.transformer import Flux3, Flux3Arch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import VL_THETA, Qwen3, Qwen3Arch

_NETWORKS: Final = built_by(
    transformer=(Flux3, Flux3Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux2())),
    text_encoder=(Qwen3, partial(Qwen3Arch.from_shapes, theta=VL_THETA)),
)
FLUX3_FILES: Final = FamilyFiles("flux3", keys.COMPONENTS, keys.resolve, {"qwen3-vl-4b": "text_encoder"}, _NETWORKS)
