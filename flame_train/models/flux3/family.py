"""FLUX.3 klein: trained on base; the distilled one, a flow map, draws its previews."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.diffusion.flow import TARGET, FlowMapPath, FlowPath, Shift, constant_shift, dynamic_sigmas
from flame_train.diffusion.samplers.euler import Euler
from flame_train.engine import Tensor, nn
from flame_train.io.weights import open_weights
from flame_train.models.common.control import ControlRule, controls_of
from flame_train.models.common.family import Networks, Opening, network_of, stated_in
from flame_train.models.common.flow_model import FlowFamily, FlowModel, networks_with_qwen3
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.flux2.family import control_placement
from flame_train.models.flux3 import names
from flame_train.models.flux3.names import FLUX3_FILES
from flame_train.models.flux3.transformer import Flux3, Flux3Arch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import VaeArch
from flame_train.text_encoders.qwen3.encoder import THINKING, Qwen3Encoder
from flame_train.text_encoders.qwen3.network import Qwen3Arch

_TAPS: Final = (4, 8, 12, 16, 20, 24, 28, 32)
_WINDOW: Final = 80  # tokens: of so many the text has a multiple, padding included
_SHIFT: Final = 6.93  # of the published scheduler; training's too

_STACKS: Final = ("content_mode_blocks.image", "txt_mode_blocks", "single_blocks")
PRESETS: Final = presets(
    attention=tuple(f"{stack}.*.{part}" for stack in _STACKS for part in ("[qkv]_proj", "attn_out")),
    mlp=tuple(f"{stack}.*.mlp_{part}" for stack in _STACKS for part in ("in", "out")),
    full=tuple(f"{stack}.*" for stack in _STACKS),
)
"""152, 228 and 228 layers. The blocks of control images alone (`content_mode_blocks.image_cond`) are in none."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Flux3Model(FlowModel):
    """Times are noise levels in (0, 1), which the network gets unchanged."""

    patch = 1
    distilled_parts = names.DISTILLED

    level_shift: float
    flow_map: bool
    """Whether it is the distilled one."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(16, 1.0) if self.flow_map else SamplingDefaults(50, 3.5)

    @property
    def shift(self) -> Shift:
        return constant_shift(self.level_shift)

    @property
    def path_kind(self) -> type[FlowPath]:
        return FlowMapPath if self.flow_map else FlowPath

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return dynamic_sigmas(steps, self.level_shift)

    @property
    def controls(self) -> ControlRule:
        """As the pipeline places several. One alone it fills up to whole tokens, which cuts nothing off."""
        return ControlRule(placed=control_placement)

    def sampler_problem(self, sampler: str) -> str:
        """Returns the mean velocity over a step, which a flow map predicts, is what Euler's method asks for."""
        if self.flow_map and sampler != Euler.name:
            return f'expected "{Euler.name}" for the distilled FLUX.3, which predicts whole steps, got "{sampler}"'
        return FlowModel.sampler_problem(self, sampler)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        """Returns the prediction; a flow map that is not told where a step goes to predicts the velocity at `t`.

        Its mean velocity over a step of no length is that (arXiv 2505.13447).

        Args:
            network, x, t, cond, guidance: as in `Model.predict`.

        Returns:
            The velocity (B, h, w, Z).
        """
        target = cond.get(TARGET, t if self.flow_map else None)
        out: Tensor = network(x, t, cond["qwen3"], cond["qwen3_rows"], controls_of(cond), target)
        return out


def _small() -> Networks:
    text = Qwen3Arch.tiny(layers=_TAPS[-1] + 1)
    return networks_with_qwen3(Flux3(Flux3Arch.tiny()), text, VaeArch.tiny(latent_channels=32))


class Flux3Family(FlowFamily):
    name = "flux3"
    files = FLUX3_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"qwen3": "text_encoder"})
    published = MappingProxyType(
        {
            "flux3-klein": lambda: networks_with_qwen3(Flux3(Flux3Arch.klein()), Qwen3Arch.vl_b4(), VaeArch.flux2()),
            "flux3-tiny": _small,
        }
    )
    small = "flux3-tiny"
    lesson = QuickstartSpec("a small FLUX.3 klein with random weights, whose images are noise")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> Flux3Model:
        text = Qwen3Encoder.opened(
            parts["text_encoder"], opening, THINKING, _TAPS, masked=True, compact=True, window=_WINDOW
        )
        return Flux3Model(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.flux2()),
            text=(text,),
            lora_names=names.lora_family(),
            presets=PRESETS,
            level_shift=_shift_beside(opening.base),
            flow_map=network_of(parts["transformer"], Flux3).arch.flow_map,
        )

    def distilled(self, base: Path) -> str:
        """Says what its tensors tell: a flow map is told one time more."""
        with open_weights(base) as weights:
            is_marked = any(sign in name for name in weights.names for sign in names.DISTILLED)
        known = "no loss of one is published; with an adapter it is trained as a flow, by its steps of no length"
        return f"is a flow map, which is told where a step goes to ({known})" if is_marked else ""


def _shift_beside(base: Path) -> float:
    """Returns what the scheduler in a folder states. Raises ModelFileError for a scheduler of another kind."""
    stated = stated_in(base, "scheduler/scheduler_config.json")
    stated.require(use_dynamic_shifting=False, invert_sigmas=False, shift_terminal=None)
    return stated.number("shift", _SHIFT)
