"""Z-Image's networks from its files. Qwen3 has a separate loader (`loading_qwen3`), which finds it in any layout."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.zimage import keys
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

_NETWORKS: Final = built_by(
    transformer=(ZImage, ZImageArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux())),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
)
ZIMAGE_FILES: Final = FamilyFiles("zimage", keys.COMPONENTS, keys.resolve, {"qwen3-4b": "text_encoder"}, _NETWORKS)
