"""Krea 2: trained on Raw, used on Turbo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.data.buckets import Placement, Size
from flame_train.diffusion.flow import Shift, dynamic_sigmas, resolution_shift
from flame_train.engine import Tensor, nn
from flame_train.errors import ModelFileError
from flame_train.models.common.control import ControlRule, controls_of
from flame_train.models.common.family import Networks, Opening, network_of, published_name, says_distilled, stated_in
from flame_train.models.common.flow_model import DistillableModel, FlowFamily, networks_with_qwen3
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.krea2 import names
from flame_train.models.krea2.arch import PATCH, Krea2Arch
from flame_train.models.krea2.names import KREA2_FILES
from flame_train.models.krea2.transformer import Krea2
from flame_train.networks.files.part import Part
from flame_train.networks.files.stated import Stated
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import VaeArch
from flame_train.text_encoders.qwen3.encoder import DESCRIBING
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower
from flame_train.text_encoders.qwen3.vision_encoder import STATES_KEPT, Qwen3VLEncoder

_GRID: Final = 16  # pixels a side of a token
_TAPS: Final = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)
_SHIFT: Final = resolution_shift(high_tokens=6400)  # of the published scheduler; training's too, as musubi-tuner has it
_TURBO_SHIFT: Final = math.exp(1.15)

PRESETS: Final = presets(
    attention=("blocks.*.attn.*",),
    mlp=("blocks.*.mlp.*",),
    full=("*",),
)
"""140, 224 and 264 layers. `full` is every linear layer, those over the text and the time included."""


def control_placement(size: Size, resolution: int) -> Placement:
    """A control image as ai-toolkit has it: at most resolution^2 pixels, stretched to the nearest whole tokens."""
    scale = min(1.0, math.sqrt(resolution**2 / math.prod(size)))
    height, width = (max(round(side * scale / _GRID) * _GRID, _GRID) for side in size)
    return Placement(size, (height, width), (height, width), 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Krea2Model(DistillableModel):
    """Times are noise levels in (0, 1), which the network gets unchanged."""

    base_sampling = SamplingDefaults(28, 5.5)
    """The card's 4.5 counts what is added to the conditional prediction; the usual scale is one more."""
    distilled_sampling = SamplingDefaults(8, 1.0)

    @property
    def shift(self) -> Shift:
        return _SHIFT

    @property
    def controls(self) -> ControlRule:
        return ControlRule(placed=control_placement)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        out: Tensor = network(x, t, cond["qwen3"], cond["qwen3_rows"], controls_of(cond))
        return out

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, _TURBO_SHIFT if self.few_steps else _SHIFT(tokens))


def _small() -> Networks:
    arch = Krea2Arch.tiny()
    text = Qwen3Arch.tiny(layers=_TAPS[arch.text_layers - 1] + 1)
    networks = networks_with_qwen3(Krea2(arch), text, VaeArch.tiny_qwen_image())
    return {**networks, "vision": VisionTower(VisionArch.tiny(text.width))}


def _published() -> Networks:
    networks = networks_with_qwen3(Krea2(Krea2Arch.base()), Qwen3Arch.vl_b4(), VaeArch.qwen_image())
    return {**networks, "vision": VisionTower(VisionArch.b4())}


class Krea2Family(FlowFamily):
    name = "krea2"
    files = KREA2_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    published = MappingProxyType(
        {
            "krea2": _published,
            "krea2-tiny": _small,
        }
    )
    small = "krea2-tiny"
    lesson = QuickstartSpec("a small Krea 2 with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> Krea2Model:
        taps = _taps(parts, stated_in(opening.base, "model_index.json"))
        text = Qwen3VLEncoder.opened(
            parts["text_encoder"], opening, DESCRIBING, taps, masked=True, compact=True, marks=STATES_KEPT
        )
        return Krea2Model(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.qwen_image()),
            text=(text,),
            lora_names=names.lora_family(),
            presets=PRESETS,
            few_steps=bool(self.distilled(opening.base)),
        )

    def distilled(self, base: Path) -> str:
        if "turbo" in published_name(base):
            return "is called Turbo"
        return says_distilled(base)


def _taps(parts: Mapping[str, Part], index: Stated) -> tuple[int, ...]:
    """Returns after which layers of the text encoder states are taken. Raises ModelFileError where they do not fit."""
    denoiser, encoder = network_of(parts["transformer"], Krea2), network_of(parts["text_encoder"], Qwen3)
    index.require(patch_size=PATCH)
    expected, width = denoiser.arch.text_layers, denoiser.arch.text_dim
    depth, own = encoder.arch.layers, encoder.arch.width
    stated = index.values.get("text_encoder_select_layers")
    taps = _TAPS[:expected] if stated is None else tuple(stated) if isinstance(stated, list) else ()
    fits = all(type(tap) is int and 0 <= tap <= depth for tap in taps) and (stated is not None or depth == taps[-1] + 1)
    if len(taps) != expected or not fits or own != width:
        raise ModelFileError(
            f"{parts['text_encoder'].path}: expected a text encoder of width {width} with states after {expected} of "
            f"its layers, found width {own}, {depth} layers, and states after {stated or list(taps)}; "
            "name the one that belongs to the transformer"
        )
    return taps
