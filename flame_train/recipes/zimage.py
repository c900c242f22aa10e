"""Z-Image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import Presets
from flame_train.diffusion.flow import Shift, constant_shift, dynamic_sigmas
from flame_train.engine import Tensor, nn
from flame_train.io.lora_names import LoraFamily
from flame_train.models.common.files.part import Part
from flame_train.models.common.text.qwen3 import Qwen3, Qwen3Arch
from flame_train.models.common.vae.vae import Vae, VaeArch
from flame_train.models.zimage import keys
from flame_train.models.zimage.files import ZIMAGE_FILES
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from flame_train.text_encoders.qwen3 import THINKING
from flame_train.training.model import Autoencoder, SamplingDefaults

from .family import Family, Networks, Opening, published_name, stated_in
from .flow import FlowModel, opened_qwen3
from .lesson import Lesson

_TAP: Final = -2  # the last hidden state but one
_TRAINING_SHIFT: Final = constant_shift(3.0)  # ai-toolkit's for Z-Image
_SAMPLING_SHIFT: Final = 6.0  # of the published scheduler
_TURBO_SHIFT: Final = 3.0  # and of Turbo's

_ATTENTION: Final = ("layers.*.attention.*",)
_MLP: Final = ("layers.*.feed_forward.*",)
PRESETS: Final[Presets] = MappingProxyType(
    {
        "attention": _ATTENTION,
        "attention+mlp": (*_ATTENTION, *_MLP),
        "full": ("layers.*", "noise_refiner.*", "context_refiner.*"),
    }
)
"""60, 150 and 202 layers. `full` is every linear layer of the blocks, modulation and refiners included."""


@dataclass(frozen=True, slots=True, eq=False)
class ZImageModel(FlowModel):
    """Times are noise levels in (0, 1). The network gets one minus them, and predicts the negative velocity."""

    turbo: bool = False

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The card's 4 counts what is added to the conditional prediction; the usual scale is one more."""
        return SamplingDefaults(8, 1.0) if self.turbo else SamplingDefaults(50, 5.0)

    @property
    def shift(self) -> Shift:
        return _TRAINING_SHIFT

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, _TURBO_SHIFT if self.turbo else _SAMPLING_SHIFT)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        out: Tensor = network(x, (1.0 - t) * 1000.0, cond["qwen3"], cond["qwen3_rows"])
        return -out


def _networks(arch: ZImageArch, qwen3: Qwen3Arch, vae: VaeArch) -> Networks:
    return {"transformer": ZImage(arch), "vae": Vae(vae), "text_encoder": Qwen3(qwen3)}


class ZImageFamily(Family):
    name = "zimage"
    files = ZIMAGE_FILES
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    unsupported = ("model.prediction", "data.max_tokens", "loss.zero_terminal_snr", "loss.guidance_scale")
    published = MappingProxyType(
        {
            "zimage": lambda: _networks(ZImageArch.base(), Qwen3Arch.b4(), VaeArch.flux()),
            "zimage-tiny": lambda: _networks(ZImageArch.tiny(), Qwen3Arch.tiny(), VaeArch.tiny(latent_channels=16)),
        }
    )
    bench_targets = "attention+mlp"
    small = "zimage-tiny"
    lesson = Lesson("a small Z-Image with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> ZImageModel:
        return ZImageModel(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.flux()),
            text=(opened_qwen3(parts["text_encoder"], opening, THINKING, (_TAP,), masked=True),),
            lora_names=keys.lora_family(),
            presets=PRESETS,
            turbo=bool(self.distilled(opening.base)),
        )

    def distilled(self, base: Path) -> str:
        if "turbo" in published_name(base):
            return "is called Turbo"
        stated = stated_in(base, "scheduler/scheduler_config.json")
        return "has a scheduler of Turbo's shift" if stated.number("shift", _SAMPLING_SHIFT) == _TURBO_SHIFT else ""

    def lora_names_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LoraFamily:
        return keys.lora_family()
