"""SDXL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from flame_train.adapters.targets import UNET_PRESETS
from flame_train.config.schema import LossSection, ModelSection
from flame_train.data.buckets import Placement, Size
from flame_train.diffusion.flow import NO_SHIFT, FlowObjective, FlowPath, constant_shift, static_sigmas
from flame_train.diffusion.losses import LOSSES
from flame_train.diffusion.noise import Noise
from flame_train.diffusion.noise_schedule import NoiseSchedule, Spacing
from flame_train.diffusion.objectives import Objective, TrainingObjective
from flame_train.diffusion.samplers import Path as SamplingPath
from flame_train.diffusion.samplers.noise_path import NoisePath
from flame_train.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS, TimestepSampling
from flame_train.diffusion.weightings import WEIGHTINGS, Weighting
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.errors import ConfigError
from flame_train.models.common.family import Family, Networks, Opening, stated_in
from flame_train.models.common.model import Example, Model, SamplingDefaults
from flame_train.models.common.small import QuickstartSpec, copy_small_sdxl
from flame_train.models.sdxl import names
from flame_train.models.sdxl.names import SDXL_FILES
from flame_train.models.sdxl.names_unet import stated_prediction
from flame_train.models.sdxl.unet import UNet, UNetArch, vector_conditioning
from flame_train.networks.files.part import Part
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.encoder import ClipG, ClipGKeys, ClipL, ClipLKeys
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.clip.tokenizer import CHUNK

_FLOW_SHIFT = 3.0
"""The shift of sampling where `loss.shift` names none. The author of bigASP 2.5 recommends 3 to 12."""


@dataclass(frozen=True, slots=True, eq=False)
class SdxlModel(Model):
    """Times are timesteps from 0 to 999. The network is conditioned on sizes and crops too."""

    flow = False
    spacing: Spacing = "leading"
    """Of the timesteps, as a folder's scheduler states it."""

    @property
    def unet(self) -> UNet:
        """The network with its weights declared, none loaded."""
        assert isinstance(self.network, UNet)
        return self.network

    @property
    def side_multiple(self) -> int:
        return int(2 ** (len(self.unet.arch.channel_mult) - 1) * self.vae.downscale)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(20, 7.0)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        context = F.cat([cond["clip_l"], cond["clip_g"]], dim=-1)
        out: Tensor = network(x, t, context, vector_conditioning(cond["pooled"], cond["time_ids"]))
        return out

    def objective(self, model: ModelSection, loss: LossSection, device: str) -> TrainingObjective:
        assert model.prediction != "flow"
        return Objective(
            noise_schedule(loss),
            model.prediction,
            kind=LOSSES.chosen(loss),
            weighting=WEIGHTINGS.chosen(loss),
            sampling=TIMESTEP_SAMPLINGS.chosen(loss),
            span=(loss.min_timestep, loss.max_timestep),
            noise=Noise.of(loss),
            device=device,
        )

    def path(
        self,
        model: ModelSection,
        loss: LossSection,
        steps: int,
        size: Size,
        spacing: Spacing | None = None,
        frames: int = 1,
    ) -> SamplingPath:
        assert model.prediction != "flow"
        usual: Spacing = "trailing" if loss.zero_terminal_snr else self.spacing
        return NoisePath(noise_schedule(loss), steps, model.prediction, spacing or usual)

    def loss_problems(
        self, loss: LossSection, weighting: type[Weighting], sampling: type[TimestepSampling]
    ) -> Mapping[str, str]:
        wrong = dict(super(SdxlModel, self).loss_problems(loss, weighting, sampling))
        if loss.shift and not self.flow:
            wrong["loss.shift"] = f'expected model.prediction = "flow" with it, got {loss.shift}; remove it'
        return wrong

    def size_conditioning(self, placement: Placement) -> Example:
        return {"time_ids": np.asarray(placement.time_ids, np.int32)}


@dataclass(frozen=True, slots=True, eq=False)
class SdxlFlowModel(SdxlModel):
    """SDXL's network trained as a rectified flow (bigASP 2.5, NoobAI RF).

    It predicts noise - x_0. The network gets 1000 s, as from ComfyUI's ModelSamplingSD3, with which the authors
    run these models; s needs not be a whole thousandth. It sees x_s itself, not scaled.
    """

    flow = True

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(28, 5.0)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        return super(SdxlFlowModel, self).predict(network, x, t * 1000.0, cond, guidance)

    def objective(self, model: ModelSection, loss: LossSection, device: str) -> TrainingObjective:
        return FlowObjective(
            TIMESTEP_SAMPLINGS.chosen(loss),
            constant_shift(loss.shift) if loss.shift else NO_SHIFT,
            LOSSES.chosen(loss),
            WEIGHTINGS.chosen(loss),
            Noise.of(loss),
            1,
            (loss.min_timestep, loss.max_timestep),
            device,
        )

    def path(
        self,
        model: ModelSection,
        loss: LossSection,
        steps: int,
        size: Size,
        spacing: Spacing | None = None,
        frames: int = 1,
    ) -> SamplingPath:
        return FlowPath(static_sigmas(steps, loss.shift or _FLOW_SHIFT))


def stated_spacing(base: Path) -> Spacing:
    """Returns how the scheduler of a diffusers folder spaces timesteps; "leading" where none says "trailing"."""
    stated = stated_in(base, "scheduler/scheduler_config.json").values.get("timestep_spacing")
    return "trailing" if stated == "trailing" else "leading"


def noise_schedule(loss: LossSection) -> NoiseSchedule:
    """Returns the model's noise schedule, with zero terminal SNR if the config wants it."""
    schedule = NoiseSchedule.scaled_linear()
    return schedule.zero_terminal_snr() if loss.zero_terminal_snr else schedule


def _networks(arch: UNetArch, clip_l: ClipArch, clip_g: ClipArch, vae: VaeArch) -> Networks:
    return {
        "unet": UNet(arch),
        "vae": Vae(vae),
        "text_encoder": ClipTextEncoder(clip_l),
        "text_encoder_2": ClipTextEncoder(clip_g),
    }


def _tiny() -> Networks:
    arch = UNetArch.tiny()
    wide = arch.context_dim // 2
    clips = ClipArch.tiny("quick_gelu", None, wide), ClipArch.tiny("gelu", arch.adm_in_channels - 6 * 256, wide)
    return _networks(arch, *clips, VaeArch.tiny())


class SdxlFamily(Family):
    name = "sdxl"
    files = SDXL_FILES
    lora_names = staticmethod(names.lora_family)
    encoders = MappingProxyType({"clip_l": "text_encoder", "clip_g": "text_encoder_2"})
    unsupported = ("loss.guidance_scale",)
    own_keys = ("sample.spacing",)
    published = MappingProxyType(
        {
            "sdxl": lambda: _networks(UNetArch.sdxl(), ClipArch.clip_l(), ClipArch.bigg(), VaeArch.sdxl()),
            "sdxl-tiny": _tiny,
        }
    )
    small = "sdxl-tiny"
    # The adapted layers see only the words, so that captions of known things hardly meet the training. The loss is
    # weighed (min-SNR with a tiny gamma) towards the noisiest timesteps, where colours are decided. The numbers were
    # found in docs/log/small-sdxl.md.
    lesson = QuickstartSpec(
        "a small SDXL that draws coloured shapes, and has never seen a Delft tile",
        "the base model is small: this shows that training works, not what SDXL can draw",
        repeats=4,
        known=200,
        resolution=96,
        bucket_step=32,
        batch_size=8,
        steps=200,
        lr=2e-3,
        targets=("*.attn2.*",),
        loss=LossSection.model_validate({"weighting": "min_snr", "snr_gamma": 0.005}),
        prompts=(
            "a delft tile with a triangle",
            "a delft tile with a large diamond",
            "a delft tile with a ring on the right",
            "a delft tile with a small cross at the top",
        ),
        known_prompts=(
            "a yellow square on the left on a green background",
            "a large red circle on a blue background",
        ),
        seed=44,
        ema_decay=0.9,
    )

    def assemble(self, parts: Mapping[str, Part], opening: Opening) -> SdxlModel:
        text, windows = opening.text, opening.max_tokens // CHUNK
        clip_l, clip_g, base = parts["text_encoder"], parts["text_encoder_2"], opening.base
        return (SdxlFlowModel if opening.model.prediction == "flow" else SdxlModel)(
            name=self.name,
            title=self.title,
            denoiser=parts["unet"],
            vae=Autoencoder(parts["vae"], VaeArch.sdxl()),
            text=(
                ClipL(clip_l, ClipLKeys.of(text).clip_l_dropout, windows, states="clip_l", base=base),
                ClipG(clip_g, ClipGKeys.of(text).clip_g_dropout, windows, states="clip_g", pooled="pooled", base=base),
            ),
            lora_names=names.lora_family(),
            presets=UNET_PRESETS,
            spacing=stated_spacing(base),
        )

    def open(self, opening: Opening) -> Model:
        model = super().open(opening)  # which refuses bases that see a second image, whatever they predict
        check_prediction(opening.base, opening.model.prediction)
        return model

    def write_small_base(self, folder: Path, seed: int) -> None:
        copy_small_sdxl(folder / "base.safetensors")


def check_prediction(base: Path, given: str) -> None:
    """Refuses training on the other target, which destroys a model without a sign in the log."""
    stated = stated_prediction(base)
    if stated and stated != given:
        raise ConfigError(
            f'model.prediction: {base} says that it predicts {stated}, got "{given}"; set model.prediction = "{stated}"'
            f" (in sample: --prediction {stated})"
        )
