"""SD3's and SD3.5's networks from their files. T5 has a separate loader (`loading_t5`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import Shape
from flame_train.models.common.files.family_files import FamilyFiles
from flame_train.models.common.files.stated import Stated
from flame_train.models.common.text.clip import Activation, ClipArch, ClipTextEncoder
from flame_train.models.common.text.t5 import T5Arch, T5Encoder
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.sd3 import keys as sd3
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch


def _build(component: str, native: Mapping[str, Shape], stated: Stated) -> nn.Module:
    if component == "transformer":
        return MMDiT(MMDiTArch.from_shapes(native, stated))
    if component == "vae":
        return Vae(VaeArch.from_shapes(native, VaeArch.sd3(), stated))
    if component == "text_encoder_3":
        return T5Encoder(T5Arch.from_shapes(native, stated))
    activation: Activation = "quick_gelu" if component == "text_encoder" else "gelu"
    return ClipTextEncoder(ClipArch.from_shapes(native, activation, stated))


_ALONE: Final = {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2", "t5-xxl": "text_encoder_3"}
SD3_FILES: Final = FamilyFiles("sd3", sd3.COMPONENTS, sd3.resolve, _ALONE, _build)
