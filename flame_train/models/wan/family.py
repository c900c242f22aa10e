"""Wan 2.2 TI2V-5B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.diffusion.flow import Shift, constant_shift, static_sigmas
from flame_train.engine import Tensor, nn
from flame_train.models.common.family import FRAME_KEYS, Networks, Opening
from flame_train.models.common.flow_model import FlowFamily, FlowModel
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.wan import names
from flame_train.models.wan.names import WAN_FILES
from flame_train.models.wan.transformer import Wan, WanArch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.t5.encoder import T5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_TOKENS: Final = 512  # all of which the denoiser looks at; those behind a caption are zeros
_SAMPLING_SHIFT: Final = 5.0  # of the published sampling
_TRAINING_SHIFT: Final = 3.0  # SimpleTuner's and musubi-tuner's for Wan

PRESETS: Final = presets(
    attention=("blocks.*_attn.[qkvo]",),
    mlp=("blocks.*.ffn.[02]",),
    full=("blocks.*",),
)
"""240, 300 and 300 layers: a block has no others."""


@dataclass(frozen=True, slots=True, eq=False)
class WanModel(FlowModel):
    """Times are noise levels in (0, 1). Latents are those of a film, of which a still has one frame."""

    fps = 24

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(50, 5.0)

    @property
    def shift(self) -> Shift:
        return constant_shift(_TRAINING_SHIFT)

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return static_sigmas(steps, _SAMPLING_SHIFT)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        out: Tensor = network(x, t * 1000.0, cond["t5"])
        return out


def _networks(arch: WanArch, t5: T5Arch, vae: VaeArch) -> Networks:
    """In the order in which `write_small` draws weights."""
    return {"transformer": Wan(arch), "vae": Vae(vae), "text_encoder": T5Encoder(t5)}


def _small() -> Networks:
    return _networks(WanArch.tiny(64), T5Arch.tiny(width=64, own_biases=True), names.TINY_VAE)


class WanFamily(FlowFamily):
    name = "wan"
    files = WAN_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"t5": "text_encoder"})
    unsupported = (*FlowFamily.unsupported, "text_encoders.t5_padding")  # rows behind a caption are zeros, as published
    own_keys = FRAME_KEYS
    published = MappingProxyType(
        {
            "wan2.2-5b": lambda: _networks(WanArch.ti2v_5b(), T5Arch.umt5_xxl(), names.PUBLISHED_VAE),
            "wan-tiny": _small,
        }
    )
    small = "wan-tiny"
    lesson = QuickstartSpec("a small Wan with random weights, whose images are noise", bucket_step=32)

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> WanModel:
        return WanModel(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], names.PUBLISHED_VAE),
            text=(T5.opened(parts["text_encoder"], opening, _TOKENS, padding="masked", cleans=True),),
            lora_names=names.lora_family(),
            presets=PRESETS,
        )
