"""An opened base model, which the stages of a run hold, and the methods that a family adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from flame_train.adapters.targets import Presets
from flame_train.config.schema import LossSection, ModelSection
from flame_train.data.buckets import Placement, Size
from flame_train.data.padding import Paddings
from flame_train.diffusion.noise_schedule import Spacing
from flame_train.diffusion.objectives import TrainingObjective
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.diffusion.samplers import Path as SamplingPath
from flame_train.diffusion.timestep_sampling import TimestepSampling
from flame_train.diffusion.weightings import Weighting
from flame_train.engine import Tensor, nn, tensor
from flame_train.engine.dtype import DType
from flame_train.families import with_control_images
from flame_train.io.lora_names import LoraFamily
from flame_train.models.common.control import ControlRule
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.files.part import Part
from flame_train.networks.fixed_batch import HostArrays
from flame_train.networks.vae.autoencoder import Autoencoder
from flame_train.networks.vae.vae import sample_latents
from flame_train.text_encoders.encoder import TextEncoder
from flame_train.text_encoders.running import RunningEncoder

Example = HostArrays
"""Arrays of one sample, without a batch dimension."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling defaults of a model: steps and guidance."""

    steps: int
    guidance_scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Model(ABC):
    """An opened base model: architecture, names and the places of weights are known; no weight is loaded.

    Attributes:
        name: its family, such as "sdxl".
        title: what a person calls it, such as "SDXL".
        denoiser: the network that is adapted.
        vae: the autoencoder.
        text: the text encoders.
        lora_names: how LoRA files name the modules.
        presets: LoRA target presets.
    """

    flow: ClassVar[bool]
    """Whether it predicts the velocity of a flow; else noise or v."""
    fps: ClassVar[int] = 0
    """Frames a second of its clips; 0: it has no time."""
    distilled_parts: ClassVar[tuple[str, ...]] = ()
    """What the names of the denoiser's tensors begin with that a distilled checkpoint has beside those of its base."""

    name: str
    title: str
    denoiser: Part
    vae: Autoencoder
    text: tuple[TextEncoder, ...]
    lora_names: LoraFamily
    presets: Presets

    @property
    def network(self) -> BlockNetwork:
        """The denoiser with its weights declared, none loaded."""
        assert isinstance(self.denoiser.network, BlockNetwork)
        return self.denoiser.network

    # ---- what a family says -------------------------------------------------------------------------

    @property
    @abstractmethod
    def side_multiple(self) -> int:
        """Image sides, in pixels, are multiples of this."""

    @property
    def longest_side(self) -> int:
        """The longest image side, in pixels, that the denoiser has positions for; 0: any."""
        return 0

    @property
    @abstractmethod
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling defaults."""

    @property
    def guidance_distilled(self) -> bool:
        """Whether the network is guidance-distilled, and needs no classifier-free guidance."""
        return False

    @property
    def guidance_keeps(self) -> int:
        """The side of the squares of latent pixels whose prediction keeps its length in guidance; 0: none does."""
        return 0

    @property
    def controls(self) -> ControlRule:
        """Which control images it takes."""
        return ControlRule(f"{self.title} looks at no control images here; {with_control_images()} do")

    @abstractmethod
    def predict(self, network: nn.Module, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor) -> Tensor:
        """Returns the denoiser's prediction, of the shape of `x`.

        Args:
            x: noised latents (B, h, w, Z), or (B, f, h, w, Z) where there is time, in the network's dtype.
            t: timesteps or noise levels (B,), as the objective gives them.
            cond: the arrays of the text encoders, of `size_conditioning` and of control images, batched.
            guidance: (1,) or (B,) fp32, the guidance scale that a guidance-distilled network gets.
        """

    @abstractmethod
    def objective(self, model: ModelSection, loss: LossSection, device: str) -> TrainingObjective:
        """Returns the training objective."""

    @abstractmethod
    def path(
        self,
        model: ModelSection,
        loss: LossSection,
        steps: int,
        size: Size,
        spacing: Spacing | None = None,
        frames: int = 1,
    ) -> SamplingPath:
        """Returns the way from noise to an image of a size: the noise levels, and how the network is asked at each.

        Args:
            model, loss: of the config.
            steps: how many.
            size: (height, width) of an image, in pixels.
            spacing: of the timesteps, for a model with a noise schedule; None: the model's own.
            frames: of a clip.

        Raises:
            ConfigError: `steps` does not fit the schedule.
        """

    def size_conditioning(self, placement: Placement) -> Example:
        """Returns the conditioning that follows from an image's size and crop alone."""
        return {}

    # ---- what all families share --------------------------------------------------------------------

    def sample_latents(self, moments: tuple[Tensor, Tensor], noise: Tensor) -> Tensor:
        """Latents (B, h, w, Z) fp32 in the denoiser's scale, of the VAE's mean and log variance, and noise."""
        return sample_latents(self.vae.published, moments, noise)

    def loss_problems(
        self, loss: LossSection, weighting: type[Weighting], sampling: type[TimestepSampling]
    ) -> Mapping[str, str]:
        """Returns the settings that do not fit this model, by key: a weighting, a timestep sampling or a guidance."""
        wrong = {}
        if not weighting.serves(self.flow):
            wrong["loss.weighting"] = f'"{weighting.name}" has no formula for {self.title}; remove it'
        wrong |= {
            f"loss.{key}": f'has no effect with "auto", which is uniform for {self.title}; '
            'set loss.timestep_sampling = "logit_normal" with it'
            for key, usual in (("logit_mean", 0.0), ("logit_std", 1.0))
            if not self.flow and sampling.name == "auto" and getattr(loss, key) != usual
        }
        if loss.guidance_scale != 1.0 and not self.guidance_distilled:
            wrong["loss.guidance_scale"] = f"this model has no guidance input, got {loss.guidance_scale}; remove it"
        return wrong

    def sampler_problem(self, sampler: str) -> str:
        """Says why this model has no sampler of that name; empty if it has it."""
        if SAMPLERS[sampler].flow or not self.flow:
            return ""
        names = " or ".join(f'"{name}"' for name, kind in SAMPLERS.items() if kind.flow)
        return f'expected {names} for a model of flow, got "{sampler}"'

    def classifier_free_guidance(self, guidance_scale: float) -> float:
        """Gives the scale of classifier-free guidance in sampling: 1, which is none, for a guidance-distilled model."""
        return 1.0 if self.guidance_distilled else guidance_scale

    def load_denoiser(
        self,
        *,
        device: str,
        dtype: DType | str,
        storage: nn.Storage | None = None,
        guidance_scale: float = 1.0,
        streamed: Collection[str] = (),
    ) -> Denoiser:
        """Returns the loaded network to adapt, and how a step calls it.

        Args:
            storage: how quantizable layers are stored; None: as all else.
            guidance_scale: the input of a guidance-distilled network.
            streamed: the names of blocks that wait in host memory.
        """
        network: BlockNetwork = self.denoiser.load(device=device, dtype=dtype, storage=storage, streamed=streamed)
        return Denoiser.of(self, network, device, guidance_scale)

    def caption_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the arrays of a caption by name, and their shapes, padding included."""
        return {name: shape for encoder in self.text for name, shape in encoder.outputs.items()}

    @property
    def paddings(self) -> Paddings:
        """How the arrays of captions that are kept without padding are filled up in a batch."""
        return {name: padding for encoder in self.text for name, padding in encoder.paddings.items()}

    def with_images(self) -> Self:
        """Returns the model whose text encoders read control images too, if they can.

        Raises ModelFileError as they do.
        """
        return replace(self, text=tuple(encoder.with_images() for encoder in self.text))

    def encoders(self, keys: Collection[str]) -> tuple[TextEncoder, ...]:
        """Returns the text encoders of these keys, in the model's order."""
        return tuple(encoder for encoder in self.text if encoder.key in keys)

    def networks(self, trained: Collection[str]) -> nn.Module:
        """The networks that get adapters, weights declared: the denoiser, and the text encoders of these keys."""
        return _joint_module(self.network, {encoder.key: encoder.part.network for encoder in self.encoders(trained)})

    def place(self, layer: str, trained: Collection[str]) -> tuple[str, str]:
        """Returns a layer of `networks`, by its name there: the component that it belongs to, and its name in that."""
        key, _, rest = layer.partition(".")
        components = {encoder.key: encoder.part.component for encoder in self.encoders(trained)}
        return (components[key], rest) if key in components else (self.denoiser.component, layer)


@dataclass(frozen=True, slots=True, eq=False)
class Denoiser:
    """A loaded network, and how a step calls it.

    Attributes:
        model: the opened model.
        network: the network.
        guidance: its guidance, a tensor (1,) on the device.
        text: the text encoders that run in the step.
    """

    model: Model
    network: BlockNetwork
    guidance: Tensor
    text: tuple[RunningEncoder, ...] = ()

    @classmethod
    def of(cls, model: Model, network: BlockNetwork, device: str, guidance_scale: float) -> Denoiser:
        """Returns the denoiser with this guidance as input."""
        return cls(model, network, tensor(np.full((1,), guidance_scale, np.float32), device=device))

    @property
    def component(self) -> str:
        """Its name in LoRA files."""
        return self.model.denoiser.component

    def networks(self, trained: Collection[str]) -> nn.Module:
        """Returns the network, and the text encoders of these keys, as `Model.networks` has them; loaded."""
        return _joint_module(self.network, {r.encoder.key: r.network for r in self.text if r.encoder.key in trained})

    def guided(self, guidance_scale: float, device: str) -> Denoiser:
        """Returns the same with another guidance as input."""
        return replace(self.of(self.model, self.network, device, guidance_scale), text=self.text)

    def conditioned(self, cond: Mapping[str, Tensor], dtype: DType) -> dict[str, Tensor]:
        """Returns a batch's conditioning in `dtype`, with arrays of the text encoders in place of token ids."""
        conditioning = dict(cond)
        for running in self.text:
            conditioning = running.conditioned(conditioning, dtype)
        return conditioning

    def denoise(self, x: Tensor, t: Tensor, cond: Mapping[str, Tensor], guidance: Tensor | None = None) -> Tensor:
        """Returns the prediction; see `Model.predict`. Token ids in `cond` are encoded first.

        `guidance` (B,) stands in the place of its own.
        """
        told = self.guidance if guidance is None else guidance
        return self.model.predict(self.network, x, t, self.conditioned(cond, x.dtype), told)

    def sample_latents(self, moments: tuple[Tensor, Tensor], noise: Tensor) -> Tensor:
        """Latents in the network's scale; see `Model.sample_latents`."""
        return self.model.sample_latents(moments, noise)


def encoder_outputs(encoders: Sequence[TextEncoder]) -> dict[str, tuple[str, ...]]:
    """Of each text encoder, by its key: the names of the arrays that it makes."""
    return {encoder.key: tuple(encoder.outputs) for encoder in encoders}


class _Networks(nn.Module):
    """All networks with adapters as one module; the layers of a text encoder stand below its key."""

    def __init__(self, denoiser: nn.Module, encoders: Mapping[str, nn.Module]) -> None:
        self._denoiser, self._encoders = denoiser, dict(encoders)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        yield from self._denoiser.named_modules(prefix)
        for key, network in self._encoders.items():
            yield from network.named_modules(f"{prefix}.{key}" if prefix else key)

    def fusable_groups(self) -> Sequence[Sequence[Any]]:
        return self._denoiser.fusable_groups()

    def ensure_loaded(self, layer: str) -> None:
        self._denoiser.ensure_loaded(layer)


def _joint_module(denoiser: nn.Module, encoders: Mapping[str, nn.Module]) -> nn.Module:
    """Returns the networks with adapters as one module: without `encoders` the denoiser itself."""
    return _Networks(denoiser, encoders) if encoders else denoiser
