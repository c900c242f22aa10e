"""Flux.1 dev, schnell and Kontext dev."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.data.buckets import Placement, Size
from flame_train.diffusion.flow import NO_SHIFT, Shift, dynamic_sigmas, resolution_shift
from flame_train.engine import Tensor, nn
from flame_train.errors import DataError
from flame_train.models.common.control import ControlRule, controls_of
from flame_train.models.common.family import Networks, Opening, network_of, published_name, stated_in
from flame_train.models.common.flow_model import DOUBLE_SINGLE_PRESETS, FlowFamily, FlowModel
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.flux import names
from flame_train.models.flux.names import FLUX_FILES
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.encoder import ClipL, ClipLKeys
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.encoder import T5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_SHIFT = resolution_shift()

PRESETS: Final = DOUBLE_SINGLE_PRESETS
"""114, 228 and 304 layers in dev. In a single-stream block one layer computes queries, keys, values and the MLP's first
part, so `attention` includes the latter. `full` is every linear layer in the blocks, modulation included, as in
sd-scripts."""


_SIDES: Final = (
    *((672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104)),
    *((1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688)),
    (1568, 672),
)
"""Widths and heights that Kontext was trained on, as FluxKontextPipeline prefers them."""

_GRID: Final = 16  # pixels: the side of a token


def control_placement(size: Size, resolution: int) -> Placement:
    """A control image as FluxKontextPipeline has it: stretched to the nearest shape that Kontext was trained on.

    Its ratio is that of whole tokens. At a resolution other than 1024 that shape is scaled.
    """
    tall, wide = (side // _GRID for side in size)
    if not tall or not wide:
        raise DataError(f"{size[1]}x{size[0]} pixels are too small for a control image: each side must have {_GRID}")
    ratio = wide / tall
    width, height = min(_SIDES, key=lambda sides: (abs(ratio - sides[0] / sides[1]), sides))
    rows, columns = (max(side * resolution // (1024 * _GRID), 1) for side in (height, width))
    bucket = rows * _GRID, columns * _GRID
    return Placement(size, bucket, bucket, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class FluxModel(FlowModel):
    """Times are noise levels in (0, 1). dev has a guidance input; schnell was distilled to four steps without one."""

    kontext: bool = False

    @property
    def transformer(self) -> Flux:
        """The network with its weights declared, none loaded."""
        return network_of(self.denoiser, Flux)

    @property
    def guidance_distilled(self) -> bool:
        return self.transformer.arch.guidance

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(28, 3.5) if self.guidance_distilled else SamplingDefaults(4, 1.0)

    @property
    def shift(self) -> Shift:
        return _SHIFT

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        """Returns the levels: dev's follow the resolution, schnell's are not shifted."""
        return dynamic_sigmas(steps, (_SHIFT if self.guidance_distilled else NO_SHIFT)(tokens))

    @property
    def controls(self) -> ControlRule:
        if not self.guidance_distilled:
            return ControlRule("Flux.1 schnell was not trained to look at control images; FLUX.1 Kontext dev was")
        if not self.kontext:
            return ControlRule(
                "nothing says that this checkpoint is FLUX.1 Kontext, which has the shapes of dev: neither its name "
                "nor its model_index.json; if it is, set model.kontext = true (sample: --kontext)"
            )
        return ControlRule(most=1, placed=control_placement)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        guidance_B = guidance.expand(x.shape[0]) if self.guidance_distilled else None
        out: Tensor = network(x, t * 1000.0, cond["t5"], cond["pooled"], guidance_B, controls_of(cond))
        return out


def _networks(arch: FluxArch, clip_l: ClipArch, t5: T5Arch, vae: VaeArch) -> Networks:
    return {
        "transformer": Flux(arch),
        "vae": Vae(vae),
        "text_encoder": ClipTextEncoder(clip_l),
        "text_encoder_2": T5Encoder(t5),
    }


def _small() -> Networks:
    width = 32
    clip_l = ClipArch.tiny("quick_gelu", None, width)
    arch = FluxArch.tiny(context_dim=2 * width, pooled_dim=width)
    return _networks(arch, clip_l, T5Arch.tiny(width=2 * width), VaeArch.tiny(latent_channels=16))


def _is_kontext(base: Path) -> bool:
    """Says whether the name of the file, folder or repository, or its `model_index.json`, says Kontext."""
    pipeline = str(stated_in(base, "model_index.json").values.get("_class_name", ""))
    return "kontext" in published_name(base) or "Kontext" in pipeline


class FluxFamily(FlowFamily):
    name = "flux"
    own_keys = ("model.kontext",)
    files = FLUX_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"clip_l": "text_encoder", "t5": "text_encoder_2"})
    unsupported = ("model.prediction", "data.max_tokens", "loss.zero_terminal_snr")
    published = MappingProxyType(
        {
            "flux-dev": lambda: _networks(FluxArch.dev(), ClipArch.clip_l(), T5Arch.xxl(), VaeArch.flux()),
            "flux-tiny": _small,
        }
    )
    small = "flux-tiny"
    lesson = QuickstartSpec("a small Flux.1 dev with random weights")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> FluxModel:
        dev, clip_l = network_of(parts["transformer"], Flux).arch.guidance, ClipLKeys.of(opening.text)
        return FluxModel(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.flux()),
            text=(
                ClipL(parts["text_encoder"], clip_l.clip_l_dropout, pooled="pooled", base=opening.base),
                T5.opened(parts["text_encoder_2"], opening, 512 if dev else 256),
            ),
            lora_names=names.lora_family(dev),
            presets=PRESETS,
            kontext=opening.model.kontext or _is_kontext(opening.base),
        )

    def distilled(self, base: Path) -> str:
        return "is called schnell" if "schnell" in published_name(base) else ""
