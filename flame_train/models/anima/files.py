"""Anima's networks from its files. Qwen3 has a separate loader (`loading_qwen3`), which finds it in any layout."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.anima import keys
from flame_train.models.anima.transformer import Anima, AnimaArch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.anima.network import AdapterArch, LlmAdapter
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

_NETWORKS: Final = built_by(
    transformer=(Anima, AnimaArch.from_shapes),
    text_conditioner=(LlmAdapter, AdapterArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.qwen_image())),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
)
ANIMA_FILES: Final = FamilyFiles("anima", keys.COMPONENTS, keys.resolve, {"qwen3-0.6b": "text_encoder"}, _NETWORKS)
