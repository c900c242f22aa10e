"""SD3's and SD3.5's networks from their files. T5 has a separate loader (`loading_t5`)."""

from __future__ import annotations

from functools import partial
from typing import Final

from flame_train.models.sd3 import keys as sd3
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.parts import built_by
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_NETWORKS: Final = built_by(
    transformer=(MMDiT, MMDiTArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.sd3())),
    text_encoder=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="quick_gelu")),
    text_encoder_2=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="gelu")),
    text_encoder_3=(T5Encoder, T5Arch.from_shapes),
)
_ALONE: Final = {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2", "t5-xxl": "text_encoder_3"}
SD3_FILES: Final = FamilyFiles("sd3", sd3.COMPONENTS, sd3.resolve, _ALONE, _NETWORKS)
