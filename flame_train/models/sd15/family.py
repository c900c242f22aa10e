"""Stable Diffusion 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from flame_train.adapters.targets import UNET_PRESETS
from flame_train.data.buckets import Placement
from flame_train.engine import Tensor, nn
from flame_train.errors import ConfigError
from flame_train.io.lora_names import LoraFamily
from flame_train.models.common.family import Family, Networks, Opening, network_of
from flame_train.models.common.model import Example, Model, SamplingDefaults
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.sd15 import names
from flame_train.models.sd15.names import SD15_FILES
from flame_train.models.sdxl.family import SdxlModel, check_prediction, stated_spacing
from flame_train.models.sdxl.names_unet import stated_prediction
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.encoder import ClipAlone, ClipH, ClipKeys
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.clip.tokenizer import CHUNK


@dataclass(frozen=True, slots=True, eq=False)
class Sd15Model(SdxlModel):
    """Times are timesteps from 0 to 999. The network sees one text encoder's states, and no sizes."""

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(50, 7.5)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        out: Tensor = network(x, t, cond["clip"])
        return out

    def size_conditioning(self, placement: Placement) -> Example:
        return {}


def _networks(unet: UNetArch, clip: ClipArch, vae: VaeArch) -> Networks:
    return {"unet": UNet(unet), "vae": Vae(vae), "text_encoder": ClipTextEncoder(clip)}


def _tiny() -> Networks:
    arch = UNetArch.tiny_sd1()
    vae = replace(VaeArch.tiny(), scaling_factor=VaeArch.sd().scaling_factor)
    return _networks(arch, ClipArch.tiny("quick_gelu", None, arch.context_dim), vae)


class Sd15Family(Family):
    name = "sd15"
    files = SD15_FILES
    encoders = MappingProxyType({"clip": "text_encoder"})
    unsupported = ("loss.guidance_scale", "loss.shift")
    own_keys = ("sample.spacing",)
    published = MappingProxyType(
        {
            "sd15": lambda: _networks(UNetArch.sd1(), ClipArch.clip_l(), VaeArch.sd()),
            "sd21": lambda: _networks(UNetArch.sd2(), ClipArch.vit_h(), VaeArch.sd()),
            "sd15-tiny": _tiny,
        }
    )
    small = "sd15-tiny"
    lesson = QuickstartSpec("a small SD 1.5 with random weights", bucket_step=64)

    @staticmethod
    def lora_names() -> LoraFamily:
        return names.lora_family(False, False)

    def lora_names_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LoraFamily:
        return names.lora_family_of(shapes)

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> Sd15Model:
        prediction, keys = opening.model.prediction, ClipKeys.of(opening.text)
        if prediction == "flow":
            raise ConfigError(f'model.prediction: expected "epsilon" or "v" for {self.title}, got "flow"')
        arch = network_of(parts["text_encoder"], ClipTextEncoder).arch
        if keys.clip_skip > arch.layers:
            raise ConfigError(
                f"text_encoders.clip_skip: expected at most {arch.layers}, the layers of this CLIP, got "
                f"{keys.clip_skip}"
            )
        v2 = arch.activation == "gelu"
        text = (ClipH if v2 else ClipAlone)(
            parts["text_encoder"],
            keys.clip_dropout,
            opening.max_tokens // CHUNK,
            states="clip",
            base=opening.base,
            skip=keys.clip_skip,
        )
        text.require_width(network_of(parts["unet"], UNet).arch.context_dim)
        return Sd15Model(
            name=self.name,
            title=self.title,
            denoiser=parts["unet"],
            vae=Autoencoder(parts["vae"], VaeArch.sd()),
            text=(text,),
            lora_names=names.lora_family(v2, prediction == "v"),
            presets=UNET_PRESETS,
            spacing=stated_spacing(opening.base),
        )

    def open(self, opening: Opening) -> Model:
        model = super().open(opening)  # which refuses bases that see a second image, whatever they predict
        check_prediction(opening.base, opening.model.prediction)
        unsaid = opening.model.prediction == "epsilon" and not stated_prediction(opening.base)
        if unsaid and names.looks_like_v(opening.base):
            raise ConfigError(
                f"model.prediction: the weights of {opening.base.name} look like those of a Stable Diffusion 2 that "
                'predicts v, as ComfyUI tells them, got "epsilon"; set model.prediction = "v" (in sample: '
                "--prediction v)"
            )
        return model
