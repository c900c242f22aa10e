"""SD3 and SD3.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.diffusion.flow import NO_SHIFT, Shift, static_sigmas
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.io.lora_names import LoraFamily
from flame_train.models.common.family import Family, Networks, Opening
from flame_train.models.common.flow_model import FlowModel
from flame_train.models.common.model import SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.sd3 import names
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch, joined_context
from flame_train.models.sd3.names import SD3_FILES
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.encoder import ClipG, ClipGKeys, ClipL, ClipLKeys
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.encoder import T5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_T5_TOKENS = 256
_SHIFT = 3.0  # of the published models' sampling

PRESETS: Final = presets(
    attention=("joint_blocks.*.attn.qkv", "joint_blocks.*.attn.proj", "joint_blocks.*.attn2.*"),
    mlp=("joint_blocks.*.mlp.fc[12]",),
    full=("joint_blocks.*",),
)
"""`full` is every linear layer of the blocks, modulation included, as sd-scripts has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Sd3Model(FlowModel):
    """Times are noise levels in (0, 1). The network has no guidance input."""

    @property
    def transformer(self) -> MMDiT:
        """The network with its weights declared, none loaded."""
        assert isinstance(self.network, MMDiT)
        return self.network

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The guidance on the models' cards: SD3 medium 7, SD3.5 medium 4.5, SD3.5 large 3.5.

        Large turbo, which wants 4 steps and none, has the shapes of large.
        """
        arch = self.transformer.arch
        return SamplingDefaults(28, 7.0 if not arch.qk_norm else 4.5 if arch.dual else 3.5)

    @property
    def longest_side(self) -> int:
        return self.side_multiple * self.transformer.arch.positions

    @property
    def shift(self) -> Shift:
        return NO_SHIFT

    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        return static_sigmas(steps, _SHIFT)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        context = joined_context(cond["clip_l"], cond["clip_g"], cond["t5"])
        pooled = F.cat([cond["pooled_l"], cond["pooled_g"]], dim=-1)
        out: Tensor = network(x, t * 1000.0, context, pooled)
        return out


def _networks(arch: MMDiTArch, clip_l: ClipArch, clip_g: ClipArch, t5: T5Arch, vae: VaeArch) -> Networks:
    return {
        "transformer": MMDiT(arch),
        "text_encoder_2": ClipTextEncoder(clip_g),
        "vae": Vae(vae),
        "text_encoder": ClipTextEncoder(clip_l),
        "text_encoder_3": T5Encoder(t5),
    }


def _published(arch: MMDiTArch) -> Networks:
    return _networks(arch, ClipArch.clip_l(), ClipArch.bigg(), T5Arch.xxl(), VaeArch.sd3())


def _small() -> Networks:
    width = 32
    arch = MMDiTArch(
        width=64,
        depth=2,
        head_dim=32,
        context_dim=2 * width,
        pooled_dim=2 * width,
        positions=16,
        qk_norm=True,
        dual=(0,),
    )
    clips = ClipArch.tiny("quick_gelu", None, width), ClipArch.tiny("gelu", width, width)
    return _networks(arch, *clips, T5Arch.tiny(width=2 * width), VaeArch.tiny(latent_channels=16))


class Sd3Family(Family):
    name = "sd3"
    files = SD3_FILES
    lora_names = staticmethod(lambda: names.lora_family_of({}))
    encoders = MappingProxyType({"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5": "text_encoder_3"})
    unsupported = (
        "model.prediction",
        "data.max_tokens",
        "loss.zero_terminal_snr",
        "loss.guidance_scale",
    )
    published = MappingProxyType(
        {
            "sd35-medium": lambda: _published(MMDiTArch.sd35_medium()),
            "sd35-large": lambda: _published(MMDiTArch.sd35_large()),
            "sd3-tiny": _small,
        }
    )
    small = "sd3-tiny"
    lesson = QuickstartSpec("a small SD3.5 with random weights")

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> Sd3Model:
        transformer = parts["transformer"].network
        assert isinstance(transformer, MMDiT)
        clip_l, clip_g = parts["text_encoder"], parts["text_encoder_2"]
        text, base = opening.text, opening.base
        return Sd3Model(
            name=self.name,
            title=self.title,
            denoiser=parts["transformer"],
            vae=Autoencoder(parts["vae"], VaeArch.sd3()),
            text=(
                ClipL(clip_l, ClipLKeys.of(text).clip_l_dropout, states="clip_l", pooled="pooled_l", base=base),
                ClipG(clip_g, ClipGKeys.of(text).clip_g_dropout, states="clip_g", pooled="pooled_g", base=base),
                T5.opened(parts["text_encoder_3"], opening, _T5_TOKENS),
            ),
            lora_names=names.lora_family(transformer.arch.depth, transformer.arch.dual),
            presets=PRESETS,
        )

    def lora_names_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LoraFamily:
        return names.lora_family_of(shapes)
