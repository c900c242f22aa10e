"""The common parts of the flow models: rectified flow, patches of latents as tokens, and their text encoders."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from flame_train.adapters.targets import presets
from flame_train.config.schema import LossSection, ModelSection
from flame_train.data.buckets import Size
from flame_train.diffusion.flow import FlowObjective, FlowPath, Shift, constant_shift
from flame_train.diffusion.losses import LOSSES
from flame_train.diffusion.noise import Noise
from flame_train.diffusion.noise_schedule import Spacing
from flame_train.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.engine import Tensor, nn
from flame_train.models.common.family import Family, Networks
from flame_train.models.common.model import Model, SamplingDefaults
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

DOUBLE_SINGLE_PRESETS: Final = presets(
    attention=("double_blocks.*_attn.qkv", "double_blocks.*_attn.proj", "single_blocks.*.linear1"),
    mlp=("double_blocks.*_mlp.[02]", "single_blocks.*.linear2"),
    full=("double_blocks.*", "single_blocks.*"),
)
"""For transformers of double and single blocks. In a single block one layer computes queries, keys, values and the
MLP's first part, so `attention` includes the latter."""


@dataclass(frozen=True, slots=True, eq=False)
class FlowModel(Model):
    """A transformer over tokens of latent pixels and of text, trained by rectified flow."""

    flow = True
    patch: ClassVar[int] = 2
    """The side of a token in latent pixels."""

    @property
    @abstractmethod
    def shift(self) -> Shift:
        """The shift of noise levels in training where a config names none."""

    @abstractmethod
    def sigmas(self, steps: int, tokens: int) -> np.ndarray[Any, Any]:
        """Returns the noise levels of sampling, for an image of so many tokens."""

    @property
    def path_kind(self) -> type[FlowPath]:
        """How the network is asked along the way from noise to image."""
        return FlowPath

    @property
    def side_multiple(self) -> int:
        return self.patch * self.vae.downscale

    def objective(self, model: ModelSection, loss: LossSection, device: str) -> FlowObjective:
        return FlowObjective(
            TIMESTEP_SAMPLINGS.chosen(loss),
            constant_shift(loss.shift) if loss.shift else self.shift,
            LOSSES.chosen(loss),
            WEIGHTINGS.chosen(loss),
            Noise.of(loss),
            self.patch,
            (loss.min_timestep, loss.max_timestep),
            device,
        )

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        """Returns the prediction (B, h, w, Z) of a network over noise levels, Qwen3's states, and their number.

        Args:
            network, x, t, cond, guidance: as in `Model.predict`.
        """
        out: Tensor = network(x, t, cond["qwen3"], cond["qwen3_rows"])
        return out

    def path(
        self,
        model: ModelSection,
        loss: LossSection,
        steps: int,
        size: Size,
        spacing: Spacing | None = None,
        frames: int = 1,
    ) -> FlowPath:
        *positions, _ = self.vae.latent_shape(size, frames)
        return self.path_kind(self.sigmas(steps, math.prod(positions) // self.patch**2))


@dataclass(frozen=True, slots=True, eq=False)
class DistillableModel(FlowModel):
    """A model that is published for many steps, and distilled to few: `few_steps` says which this is."""

    base_sampling: ClassVar[SamplingDefaults]
    distilled_sampling: ClassVar[SamplingDefaults]
    few_steps: bool = False

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self.distilled_sampling if self.few_steps else self.base_sampling


class FlowFamily(Family):
    """A family of flow models, with what holds for most: their guidance is classifier-free."""

    unsupported: ClassVar[tuple[str, ...]] = (
        "model.prediction",
        "data.max_tokens",
        "loss.zero_terminal_snr",
        "loss.guidance_scale",
    )
    bench_targets = "attention+mlp"


def networks_with_qwen3(denoiser: nn.Module, text: Qwen3Arch, vae: VaeArch) -> Networks:
    """The networks of a model whose text encoder is a Qwen3, in the order in which `write_small` draws weights."""
    return {"transformer": denoiser, "vae": Vae(vae), "text_encoder": Qwen3(text)}
