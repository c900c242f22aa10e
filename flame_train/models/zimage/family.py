"""Z-Image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.diffusion.flow import Shift, constant_shift, dynamic_sigmas
from flame_train.engine import Tensor, nn
from flame_train.models.common.family import Networks, Opening, published_name, stated_in
from flame_train.models.common.flow_model import DistillableModel, FlowFamily, networks_with_qwen3
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.zimage import names
from flame_train.models.zimage.names import ZIMAGE_FILES
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import VaeArch
from flame_train.text_encoders.qwen3.encoder import THINKING, Qwen3Encoder
from flame_train.text_encoders.qwen3.network import Qwen3Arch

_TAP: Final = -2  # the last hidden state but one
_TRAINING_SHIFT: Final = constant_shift(3.0)  # ai-toolkit's for Z-Image
_SAMPLING_SHIFT: Final = 6.0  # of the published scheduler
_TURBO_SHIFT: Final = 3.0  # and of Turbo's
_DE_DISTILLED: Final = re.compile(r"de[-_]?turbo")  # ostris' Z-Image De-Turbo, which trains as a base does

PRESETS: Final = presets(
    attention=("layers.*.attention.*",),
    mlp=("layers.*.feed_forward.*",),
    full=("layers.*", "noise_refiner.*", "context_refiner.*"),
)
"""60, 150 and 202 layers. `full` is every linear layer of the blocks, modulation and refiners included."""


@dataclass(frozen=True, slots=True, eq=False)
class ZImageModel(DistillableModel):
    """Times are noise levels in (0, 1). The network gets one minus them, and predicts the negative velocity."""

    base_sampling = SamplingDefaults(50, 5.0)
    """The card's 4 counts what is added to the conditional prediction; the usual scale is one more."""
    distilled_sampling = SamplingDefaults(8, 1.0)

    @property
    def shift(self) -> Shift:
        return _TRAINING_SHIFT

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, _TURBO_SHIFT if self.few_steps else _SAMPLING_SHIFT)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        out: Tensor = network(x, (1.0 - t) * 1000.0, cond["qwen3"], cond["qwen3_rows"])
        return -out


def _small() -> Networks:
    return networks_with_qwen3(ZImage(ZImageArch.tiny()), Qwen3Arch.tiny(), VaeArch.tiny(latent_channels=16))


class ZImageFamily(FlowFamily):
    name = "zimage"
    files = ZIMAGE_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    published = MappingProxyType(
        {
            "zimage": lambda: networks_with_qwen3(ZImage(ZImageArch.base()), Qwen3Arch.b4(), VaeArch.flux()),
            "zimage-tiny": _small,
        }
    )
    small = "zimage-tiny"
    lesson = QuickstartSpec("a small Z-Image with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> ZImageModel:
        return ZImageModel(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.flux()),
            text=(Qwen3Encoder.opened(parts["text_encoder"], opening, THINKING, (_TAP,), masked=True),),
            lora_names=names.lora_family(),
            presets=PRESETS,
            few_steps=bool(self.distilled(opening.base)),
        )

    def distilled(self, base: Path) -> str:
        name = published_name(base)
        if _DE_DISTILLED.search(name):
            return ""
        if "turbo" in name:
            return "is called Turbo"
        stated = stated_in(base, "scheduler/scheduler_config.json")
        return "has a scheduler of Turbo's shift" if stated.number("shift", _SAMPLING_SHIFT) == _TURBO_SHIFT else ""
