"""Qwen-Image 2.1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.data.buckets import Placement, Size, width_by_height
from flame_train.diffusion.flow import Shift, dynamic_sigmas, resolution_shift
from flame_train.engine import Tensor, nn
from flame_train.errors import DataError
from flame_train.models.common.control import ControlRule, controls_of
from flame_train.models.common.family import Networks, Opening, published_name, stated_in
from flame_train.models.common.flow_model import FlowFamily, FlowModel, networks_with_qwen3
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.qwenimage import names
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.names import QWENIMAGE_FILES
from flame_train.models.qwenimage.transformer import QwenImage
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import VaeArch
from flame_train.text_encoders.qwen3.encoder import COMPREHENDING
from flame_train.text_encoders.qwen3.network import Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower
from flame_train.text_encoders.qwen3.vision_encoder import Qwen3VLEncoder, of_area

_TAP: Final = -1  # the last hidden state, before the text encoder's final norm
# of the published scheduler: mu by the image's tokens, and the last noise level before 0
_MU: Final = {"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256.0, "max_image_seq_len": 8192.0}
_TERMINAL: Final = 0.02
_SQUARE: Final = 2  # tokens a side of what stands for one token of the text encoder, which a published image has whole

PRESETS: Final = presets(
    attention=("transformer_blocks.*.attn.*",),
    mlp=("transformer_blocks.*.img_mlp.*",),
    full=("*",),
)
"""128, 192 and 200 layers. `full` is every linear layer, those over the text and the time included."""


def control_placement(size: Size, resolution: int) -> Placement:
    """A control image as Qwen-Image's pipelines have it: stretched to some resolution^2 pixels, in sides of 32."""
    bucket = of_area(size, resolution**2)
    if not all(bucket):
        raise DataError(
            f"{width_by_height(size)} pixels are too narrow for a control image of some {resolution}x{resolution}"
        )
    return Placement(size, bucket, bucket, 0, 0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The noise levels of sampling, as a folder states them or as published.

    Attributes:
        shift: by an image's tokens; of training too.
        terminal: the last level before 0; None: as it comes.
        levels: before their shift, those of a checkpoint that was distilled to few steps; none for the base.
    """

    shift: Shift
    terminal: float | None
    levels: tuple[float, ...]

    @classmethod
    def beside(cls, base: Path) -> Schedule:
        """Returns that of a checkpoint. Raises ModelFileError for a scheduler of another kind."""
        stated = stated_in(base, "scheduler/scheduler_config.json")
        stated.require(use_dynamic_shifting=True, time_shift_type="exponential", invert_sigmas=False)
        low, high, low_tokens, high_tokens = (stated.number(key, usual) for key, usual in _MU.items())
        none = "shift_terminal" in stated.values and stated.values["shift_terminal"] is None
        terminal = None if none else stated.number("shift_terminal", _TERMINAL)
        return cls(resolution_shift(low, high, int(low_tokens), int(high_tokens)), terminal, _levels(base))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QwenImageModel(FlowModel):
    """Times are noise levels in (0, 1). A token is one latent pixel."""

    patch = 1

    schedule: Schedule

    @property
    def side_multiple(self) -> int:
        return _SQUARE * self.vae.downscale

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """No guidance: the published weights were made to be used without."""
        return SamplingDefaults(len(self.schedule.levels) or 40, 1.0)

    @property
    def shift(self) -> Shift:
        return self.schedule.shift

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        own = self.schedule
        return dynamic_sigmas(steps, own.shift(tokens), terminal=own.terminal, published=own.levels)

    @property
    def controls(self) -> ControlRule:
        return ControlRule(placed=control_placement)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        (text,), controls = self.text, controls_of(cond)
        assert isinstance(text, Qwen3VLEncoder)
        starts = text.starts(len(controls)) if controls else ()
        out: Tensor = network(x, t, cond["qwen3"], cond["qwen3_rows"], controls, starts)
        return out


def _networks(denoiser: QwenImageArch, text: Qwen3Arch, own_vae: VaeArch, vision: VisionArch) -> Networks:
    networks = networks_with_qwen3(QwenImage(denoiser), text, own_vae)
    return {**networks, "vision": VisionTower(vision)}


class QwenImageFamily(FlowFamily):
    name = "qwenimage"
    files = QWENIMAGE_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    published = MappingProxyType(
        {
            "qwen-image": lambda: _networks(
                QwenImageArch.base(), Qwen3Arch.vl_b8(), names.PUBLISHED_VAE, VisionArch.b8()
            ),
            "qwen-image-tiny": lambda: _networks(
                QwenImageArch.tiny(), Qwen3Arch.tiny(), names.TINY_VAE, VisionArch.tiny(Qwen3Arch.tiny().width)
            ),
        }
    )
    small = "qwen-image-tiny"
    lesson = QuickstartSpec("a small Qwen-Image with random weights, whose images are noise", bucket_step=32)

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> QwenImageModel:
        text = Qwen3VLEncoder.opened(
            parts["text_encoder"], opening, COMPREHENDING, (_TAP,), masked=True, normalised=False
        )
        return QwenImageModel(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], names.PUBLISHED_VAE),
            text=(text,),
            lora_names=names.lora_family(),
            presets=PRESETS,
            schedule=Schedule.beside(opening.base),
        )

    def distilled(self, base: Path) -> str:
        if "turbo" in published_name(base):
            return "is called Turbo"
        return "states noise levels of few steps" if _levels(base) else ""


def _levels(base: Path) -> tuple[float, ...]:
    """Returns the unshifted levels of sampling that a folder states; None for the model that is trained on."""
    stated = stated_in(base, "model_index.json").values.get("sample_sigmas")
    return tuple(stated) if isinstance(stated, list) and all(isinstance(s, int | float) for s in stated) else ()
