"""FLUX.2's networks from its files. Qwen3 has a separate loader (`loading_qwen3`), which finds it in any layout."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.flux2 import keys
from flame_train.models.flux2.transformer import Flux2, Flux2Arch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

_NETWORKS: Final = built_by(
    transformer=(Flux2, Flux2Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux2())),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
)
_ALONE: Final = {"qwen3-4b": "text_encoder", "qwen3-8b": "text_encoder"}
FLUX2_FILES: Final = FamilyFiles("flux2", keys.COMPONENTS, keys.resolve, _ALONE, _NETWORKS)
