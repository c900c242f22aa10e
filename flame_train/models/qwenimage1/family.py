"""Qwen-Image 1, and Qwen-Image-Edit 2509 and 2511, which look at control images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.diffusion.flow import Shift, dynamic_sigmas
from flame_train.engine import Tensor, nn
from flame_train.models.common.control import ControlRule, controls_of
from flame_train.models.common.family import Networks, Opening, published_name
from flame_train.models.common.flow_model import FlowFamily, FlowModel, networks_with_qwen3
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.qwenimage.family import Schedule, control_placement
from flame_train.models.qwenimage1 import names
from flame_train.models.qwenimage1.edit import PLUS, Edit, edit_of
from flame_train.models.qwenimage1.names import QWENIMAGE1_FILES
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import VaeArch
from flame_train.text_encoders.qwen3.encoder import DESCRIBING, EDITING, Qwen3Encoder
from flame_train.text_encoders.qwen3.network import Qwen3Arch
from flame_train.text_encoders.qwen3.vision_2_5 import Vision25Arch, VisionTower25
from flame_train.text_encoders.qwen3.vision_encoder import STATES_KEPT_2_5, Qwen3VLEncoder

_TAP: Final = -1  # the last hidden state, normalised
_ARCHITECTURES: Final = {"2509": ("Qwen-Image-Edit-Plus",), "2511": ("Qwen-Image-Edit-2511",)}
"""What musubi-tuner writes into their LoRAs."""
_FEW_STEPS: Final = ("lightning", "distill")  # in the names of checkpoints that were distilled

PRESETS: Final = presets(
    attention=("transformer_blocks.*.attn.*",),
    mlp=("transformer_blocks.*.img_mlp.*", "transformer_blocks.*.txt_mlp.*"),
    full=("*",),
)
"""480, 720 and 846 layers. `full` is every linear layer, modulation and ends included."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QwenImage1Model(FlowModel):
    """Times are noise levels in (0, 1). `edit` is that of `edit_of`."""

    schedule: Schedule
    edit: Edit = ""

    @property
    def controls(self) -> ControlRule:
        if self.edit in PLUS:
            return ControlRule(placed=control_placement)
        if self.edit:
            return ControlRule(
                "this is the first Qwen-Image-Edit, whose text encoder reads images in another way that is not "
                "supported here; Qwen-Image-Edit 2509 and 2511 are. If it is one of these, set model.qwen_edit "
                "(sample: --qwen-edit)"
            )
        return ControlRule(
            "nothing says that this checkpoint is Qwen-Image-Edit, which has the shapes of Qwen-Image: neither its "
            'name nor its folder nor a tensor; if it is, set model.qwen_edit = "2509" or "2511" (sample: --qwen-edit)'
        )

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        controls = controls_of(cond)
        out: Tensor = network(x, t, cond["qwen3"], cond["qwen3_rows"], controls, self.edit == "2511")
        return out

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


def _networks(arch: QwenImage1Arch) -> Networks:
    networks = networks_with_qwen3(QwenImage1(arch), Qwen3Arch.vl2_5_b7(), VaeArch.qwen_image())
    return {**networks, "vision": VisionTower25(Vision25Arch.b7())}


def _small(arch: QwenImage1Arch) -> Networks:
    networks = networks_with_qwen3(QwenImage1(arch), Qwen3Arch.tiny_2_5(), VaeArch.tiny_qwen_image())
    return {**networks, "vision": VisionTower25(Vision25Arch.tiny())}


class QwenImage1Family(FlowFamily):
    name = "qwenimage1"
    own_keys = ("model.qwen_edit",)
    files = QWENIMAGE1_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    published = MappingProxyType(
        {
            "qwen-image-1": lambda: _networks(QwenImage1Arch.base()),
            "qwen-image-edit": lambda: _networks(QwenImage1Arch.base(zero_cond=True)),
            "qwen-image-1-tiny": lambda: _small(QwenImage1Arch.tiny()),
            "qwen-image-edit-tiny": lambda: _small(QwenImage1Arch.tiny(zero_cond=True)),
        }
    )
    small = "qwen-image-1-tiny"
    lesson = QuickstartSpec("a small Qwen-Image 1 with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> QwenImage1Model:
        edit = edit_of(parts["transformer"], opening)
        encoder, taps = parts["text_encoder"], (_TAP,)
        if edit in PLUS:
            text: Qwen3Encoder = Qwen3VLEncoder.opened(
                encoder, opening, EDITING, taps, masked=True, marks=STATES_KEPT_2_5
            )
        else:
            text = Qwen3Encoder.opened(encoder, opening, DESCRIBING, taps, masked=True)
        return QwenImage1Model(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.qwen_image()),
            text=(text,),
            lora_names=names.lora_family(*_ARCHITECTURES.get(edit, ())),
            presets=PRESETS,
            schedule=Schedule.beside(opening.base),
            edit=edit,
        )

    def distilled(self, base: Path) -> str:
        sign = next((word for word in _FEW_STEPS if word in published_name(base)), "")
        return f"has {sign} in its name" if sign else ""
