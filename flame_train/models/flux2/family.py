"""FLUX.2 dev, and klein base, 4B and 9B."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.data.buckets import Placement, Size
from flame_train.diffusion.flow import NO_SHIFT, Shift, dynamic_sigmas
from flame_train.engine import Tensor, nn
from flame_train.errors import DataError
from flame_train.models.common.control import ControlRule, controls_of
from flame_train.models.common.family import Networks, Opening, network_of, published_name, says_distilled
from flame_train.models.common.flow_model import (
    DOUBLE_SINGLE_PRESETS,
    DistillableModel,
    FlowFamily,
    networks_with_qwen3,
)
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.flux2 import names
from flame_train.models.flux2.names import FLUX2_FILES
from flame_train.models.flux2.transformer import Flux2, Flux2Arch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.encoder import TextEncoder
from flame_train.text_encoders.mistral.encoder import MistralEncoder, behind_padding
from flame_train.text_encoders.mistral.names import COMPONENT as MISTRAL
from flame_train.text_encoders.mistral.network import TAPS, Mistral, MistralArch
from flame_train.text_encoders.qwen3.encoder import WITHOUT_THINKING, Qwen3Encoder
from flame_train.text_encoders.qwen3.network import Qwen3Arch

_TAPS: Final = (9, 18, 27)

PRESETS: Final = DOUBLE_SINGLE_PRESETS
"""40, 80 and 80 layers in klein 4B, 80, 160 and 160 in dev: the modulation is outside the blocks."""


def sampling_shift(tokens: int, steps: int) -> float:
    """exp(mu) of the published sampling: mu between two lines in the number of tokens, by the steps (BFL's flux2)."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return math.exp(at_200)
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return math.exp(slope * steps + at_200 - 200.0 * slope)


_GRID: Final = 16  # pixels: the side of a token


def control_placement(size: Size, resolution: int) -> Placement:
    """A control image as Flux2KleinPipeline has it: at most resolution^2 pixels, cut in the centre to whole tokens."""
    height, width = size
    scale = min(1.0, math.sqrt(resolution**2 / (height * width)))
    resized = int(height * scale), int(width * scale)
    bucket = resized[0] // _GRID * _GRID, resized[1] // _GRID * _GRID
    if not all(bucket):
        raise DataError(f"{width}x{height} pixels are too small for a control image: each side must have {_GRID}")
    return Placement(size, bucket, resized, (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2)


@dataclass(frozen=True, slots=True, eq=False)
class Flux2Model(DistillableModel):
    """Times are noise levels in (0, 1). dev alone has a guidance input. Both attend to the text's padding."""

    patch = 1

    base_sampling = SamplingDefaults(50, 4.0)
    distilled_sampling = SamplingDefaults(4, 1.0)

    @property
    def guidance_distilled(self) -> bool:
        return network_of(self.denoiser, Flux2).arch.guidance

    @property
    def shift(self) -> Shift:
        return NO_SHIFT

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, sampling_shift(tokens, steps))

    @property
    def controls(self) -> ControlRule:
        return ControlRule(placed=control_placement)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        if not self.guidance_distilled:
            klein: Tensor = network(x, t * 1000.0, cond["qwen3"], controls_of(cond))
            return klein
        (text,) = self.text
        context = behind_padding(cond["mistral"], cond["mistral_rows"], text.limit[1])
        out: Tensor = network(x, t * 1000.0, context, controls_of(cond), guidance.expand(x.shape[0]))
        return out


def _small() -> Networks:
    return networks_with_qwen3(Flux2(Flux2Arch.tiny()), Qwen3Arch.tiny(layers=27), VaeArch.tiny(latent_channels=32))


def _dev(arch: Flux2Arch, text: MistralArch, vae: VaeArch) -> Networks:
    return {"transformer": Flux2(arch), "vae": Vae(vae), MISTRAL: Mistral(text)}


def _small_dev() -> Networks:
    text = MistralArch.tiny()
    arch = Flux2Arch.tiny(context_dim=len(TAPS) * text.width, guidance=True)
    return _dev(arch, text, VaeArch.tiny(latent_channels=32))


class Flux2Family(FlowFamily):
    name = "flux2"
    files = FLUX2_FILES
    lora_names = staticmethod(names.lora_family)
    lora_names_in = staticmethod(names.lora_names_in)
    encoders = MappingProxyType({"qwen3": "text_encoder", "mistral": MISTRAL})
    unsupported = tuple(key for key in FlowFamily.unsupported if key != "loss.guidance_scale")
    published = MappingProxyType(
        {
            "flux2-dev": lambda: _dev(Flux2Arch.dev(), MistralArch.small_3(), VaeArch.flux2()),
            "klein-4b": lambda: networks_with_qwen3(Flux2(Flux2Arch.klein_4b()), Qwen3Arch.b4(), VaeArch.flux2()),
            "klein-9b": lambda: networks_with_qwen3(Flux2(Flux2Arch.klein_9b()), Qwen3Arch.b8(), VaeArch.flux2()),
            "flux2-dev-tiny": _small_dev,
            "flux2-tiny": _small,
        }
    )
    small = "flux2-tiny"
    lesson = QuickstartSpec("a small FLUX.2 klein with random weights, whose images are noise")

    def encoders_of(self, denoiser: nn.Module) -> Mapping[str, str]:
        assert isinstance(denoiser, Flux2)
        key = "mistral" if denoiser.arch.guidance else "qwen3"
        return {key: self.encoders[key]}

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> Flux2Model:
        arch = network_of(parts["transformer"], Flux2).arch
        text: TextEncoder
        if arch.guidance:
            text = MistralEncoder.opened(parts[MISTRAL], opening)
        else:
            text = Qwen3Encoder.opened(parts["text_encoder"], opening, WITHOUT_THINKING, _TAPS, masked=False)
        text.require_width(arch.context_dim)
        return Flux2Model(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.flux2()),
            text=(text,),
            lora_names=names.lora_family(arch.depth, arch.single_depth, arch.guidance),
            presets=PRESETS,
            few_steps=bool(self.distilled(opening.base)),
        )

    def distilled(self, base: Path) -> str:
        name = published_name(base)
        if "klein" in name and "base" not in name:
            return "is called klein without base"
        return says_distilled(base)
