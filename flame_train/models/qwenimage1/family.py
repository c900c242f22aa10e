"""Qwen-Image 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.diffusion.flow import Shift, dynamic_sigmas
from flame_train.models.common.family import Opening, published_name
from flame_train.models.common.flow_model import FlowFamily, FlowModel, networks_with_qwen3
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.qwenimage.family import Schedule
from flame_train.models.qwenimage1 import names
from flame_train.models.qwenimage1.names import QWENIMAGE1_FILES
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import VaeArch
from flame_train.text_encoders.qwen3.encoder import DESCRIBING, Qwen3Encoder
from flame_train.text_encoders.qwen3.network import Qwen3Arch

_TAP: Final = -1  # the last hidden state, normalised
_FEW_STEPS: Final = ("lightning", "distill")  # in the names of checkpoints that were distilled

PRESETS: Final = presets(
    attention=("transformer_blocks.*.attn.*",),
    mlp=("transformer_blocks.*.img_mlp.*", "transformer_blocks.*.txt_mlp.*"),
    full=("*",),
)
"""480, 720 and 846 layers. `full` is every linear layer, modulation and ends included."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QwenImage1Model(FlowModel):
    """Times are noise levels in (0, 1)."""

    schedule: Schedule

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(50, 4.0)

    @property
    def shift(self) -> Shift:
        return self.schedule.shift

    @property
    def guidance_keeps(self) -> int:
        return self.patch

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, self.schedule.shift(tokens), terminal=self.schedule.terminal)


class QwenImage1Family(FlowFamily):
    name = "qwenimage1"
    files = QWENIMAGE1_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    published = MappingProxyType(
        {
            "qwen-image-1": lambda: networks_with_qwen3(
                QwenImage1(QwenImage1Arch.base()), Qwen3Arch.vl2_5_b7(), VaeArch.qwen_image()
            ),
            "qwen-image-1-tiny": lambda: networks_with_qwen3(
                QwenImage1(QwenImage1Arch.tiny()), Qwen3Arch.tiny_2_5(), VaeArch.tiny_qwen_image()
            ),
        }
    )
    small = "qwen-image-1-tiny"
    lesson = QuickstartSpec("a small Qwen-Image 1 with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> QwenImage1Model:
        return QwenImage1Model(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.qwen_image()),
            text=(Qwen3Encoder.opened(parts["text_encoder"], opening, DESCRIBING, (_TAP,), masked=True),),
            lora_names=names.lora_family(),
            presets=PRESETS,
            schedule=Schedule.beside(opening.base),
        )

    def distilled(self, base: Path) -> str:
        sign = next((word for word in _FEW_STEPS if word in published_name(base)), "")
        return f"has {sign} in its name" if sign else ""
