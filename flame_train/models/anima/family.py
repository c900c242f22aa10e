"""Anima."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.diffusion.flow import NO_SHIFT, Shift, dynamic_sigmas
from flame_train.engine import Tensor, nn
from flame_train.errors import ConfigError
from flame_train.models.anima import names
from flame_train.models.anima.names import ANIMA_FILES
from flame_train.models.anima.transformer import Anima, AnimaArch
from flame_train.models.common.family import Networks, Opening
from flame_train.models.common.flow_model import FlowFamily, FlowModel
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.networks.files.part import JoinedPart, Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.anima.encoder import PLAIN, AnimaEncoder
from flame_train.text_encoders.anima.network import AdapterArch, AnimaText, LlmAdapter
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

_SAMPLING_SHIFT: Final = 3.0  # ComfyUI's for Anima, and the published scheduler's

PRESETS: Final = presets(
    attention=("blocks.*_attn.*_proj",),
    mlp=("blocks.*.mlp.layer[12]",),
    full=("blocks.*",),
)
"""224, 280 and 448 layers. `full` is every linear layer of the blocks, modulation included."""


@dataclass(frozen=True, slots=True, eq=False)
class AnimaModel(FlowModel):
    """Times are noise levels in (0, 1), which the network gets unchanged."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(50, 4.0)

    @property
    def shift(self) -> Shift:
        return NO_SHIFT

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, _SAMPLING_SHIFT)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        out: Tensor = network(x, t, cond["anima"])
        return out


def _networks(arch: AnimaArch, adapter: AdapterArch, qwen3: Qwen3Arch, vae: VaeArch) -> Networks:
    """In the order in which `write_small` draws weights."""
    return {
        "transformer": Anima(arch),
        "text_conditioner": LlmAdapter(adapter),
        "vae": Vae(vae),
        "text_encoder": Qwen3(qwen3),
    }


class AnimaFamily(FlowFamily):
    name = "anima"
    files = ANIMA_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    published = MappingProxyType(
        {
            "anima": lambda: _networks(AnimaArch.base(), AdapterArch(), Qwen3Arch.b0_6(), VaeArch.qwen_image()),
            "anima-2.9b": lambda: _networks(AnimaArch.deep(), AdapterArch(), Qwen3Arch.b0_6(), VaeArch.qwen_image()),
            "anima-tiny": lambda: _networks(
                AnimaArch.tiny(), AdapterArch.tiny(), Qwen3Arch.tiny(), VaeArch.tiny_qwen_image()
            ),
        }
    )
    small = "anima-tiny"
    lesson = QuickstartSpec("a small Anima with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> AnimaModel:
        if "text_conditioner" not in parts:
            raise ConfigError(
                f"model.checkpoint: {opening.base} holds no llm_adapter, which makes Anima's text of Qwen3's; name the "
                "published single file, or the whole diffusers folder with its text_conditioner"
            )
        both = {"qwen3": parts["text_encoder"], "llm_adapter": parts["text_conditioner"]}
        text = JoinedPart.of("qwen3", both, AnimaText)
        return AnimaModel(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.qwen_image()),
            text=(AnimaEncoder.opened(text, opening, PLAIN, (-1,), masked=True),),
            lora_names=names.lora_family(),
            presets=PRESETS,
        )
