"""Chroma1 Base and HD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.diffusion.flow import NO_SHIFT, Shift, dynamic_sigmas, resolution_shift
from flame_train.engine import Tensor, nn
from flame_train.models.chroma import names
from flame_train.models.chroma.names import CHROMA_FILES
from flame_train.models.chroma.transformer import Chroma, ChromaArch
from flame_train.models.common.family import Networks, Opening, published_name
from flame_train.models.common.flow_model import DOUBLE_SINGLE_PRESETS, FlowFamily, FlowModel
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.t5.encoder import T5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_TOKENS: Final = 512
_BEHIND: Final = 1  # of the padding is looked at, as it was trained
_SAMPLING_SHIFT: Final = resolution_shift()

PRESETS: Final = DOUBLE_SINGLE_PRESETS
"""114, 228 and 228 layers. The network that makes the modulations is in none of them: it is not to be trained."""


@dataclass(frozen=True, slots=True, eq=False)
class ChromaModel(FlowModel):
    """Times are noise levels in (0, 1). Guidance is classifier-free."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(35, 5.0)

    @property
    def shift(self) -> Shift:
        return NO_SHIFT

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, _SAMPLING_SHIFT(tokens))

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        out: Tensor = network(x, t * 1000.0, cond["t5"], cond["t5_rows"])
        return out


def _networks(arch: ChromaArch, t5: T5Arch, vae: VaeArch) -> Networks:
    return {"transformer": Chroma(arch), "vae": Vae(vae), "text_encoder": T5Encoder(t5)}


class ChromaFamily(FlowFamily):
    name = "chroma"
    files = CHROMA_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"t5": "text_encoder"})
    unsupported = (*FlowFamily.unsupported, "text_encoders.t5_padding")  # it always looks at one token of padding
    published = MappingProxyType(
        {
            "chroma": lambda: _networks(ChromaArch.base(), T5Arch.xxl(), VaeArch.flux()),
            "chroma-tiny": lambda: _networks(
                ChromaArch.tiny(64), T5Arch.tiny(width=64), VaeArch.tiny(latent_channels=16)
            ),
        }
    )
    small = "chroma-tiny"
    lesson = QuickstartSpec("a small Chroma with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> ChromaModel:
        return ChromaModel(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.flux()),
            text=(T5.opened(parts["text_encoder"], opening, _TOKENS, _BEHIND),),
            lora_names=names.lora_family(),
            presets=PRESETS,
        )

    def distilled(self, base: Path) -> str:
        return "is called Flash" if "flash" in published_name(base) else ""
