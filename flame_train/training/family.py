"""What training asks of a model family. A recipe answers; nothing here knows which family it is."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np

from flame_train.adapters.targets import Presets
from flame_train.config.keys import keys
from flame_train.config.render import toml_value
from flame_train.config.schema import Config
from flame_train.data.buckets import Placement
from flame_train.engine import Tensor, nn
from flame_train.engine.ops.attention_parts import larger_part
from flame_train.errors import ConfigError
from flame_train.io.lora_names import LoraFamily
from flame_train.models.family_files import FamilyFiles
from flame_train.models.identify import FAMILY_NAMES
from flame_train.models.recompute import BlockNetwork, Recompute, run_again
from flame_train.models.vae import Vae

from .step import Denoise, Objective, SampleLatents

H100: Final = 132
"""Its multiprocessors, and an H200's: for one of these memory is predicted where there is no GPU."""

Sampler = Callable[[Callable[[Tensor, Tensor, Any], Tensor], Tensor, Any], Tensor]
"""(denoise(x, t, cond), standard normal noise (B, h, w, Z), cond) -> latents."""

Example = dict[str, np.ndarray[Any, Any]]
"""Arrays of one sample, without a batch dimension."""


class Encoders(Protocol):
    """The networks that turn pictures and captions into what the denoiser is trained on."""

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """Those of captions, by the names that LoRA files have for them."""

    def picture(self, pixels: np.ndarray[Any, Any]) -> Example:
        """The latents' `mean` and `logvar`, fp32 (h, w, Z), of uint8 RGB pixels (H, W, 3)."""

    def caption(self, text: str) -> Example:
        """The conditioning arrays of a caption."""


@dataclass(frozen=True, slots=True)
class Denoiser:
    """The network that is adapted, and the functions the step calls. `component` names it in LoRA files.

    `drawing` is what sampling calls, where that is not `denoise`: a guidance may be told then that training is not.
    """

    model: nn.Module
    component: str
    denoise: Denoise
    sample_latents: SampleLatents
    drawing: Denoise | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What the memory of a step depends on: bucket (H, W) in pixels, pictures, bytes an element, and how it is run.

    `recompute` means the blocks named in `blocks`; None: all. `warpgroups`: the GPU's multiprocessors, if they have
    the products of warpgroups, as compute capability 9.0 does, else 0. `adapted` are the names of the layers with a
    LoRA.
    """

    bucket: tuple[int, int]
    batch: int
    itemsize: int
    recompute: Recompute
    deterministic: bool
    blocks: Container[str] | None = None
    warpgroups: int = H100
    adapted: frozenset[str] = frozenset()

    def of(self, block: str) -> Recompute:
        """What is run again of the block of that name."""
        return self.recompute if self.blocks is None or block in self.blocks else "nothing"

    def made_again(self, most: float, spared: float) -> float:
        """What is there of blocks run again while one is, in units of the caller's: `most` of the largest.

        It is no more than what they have `spared` by not keeping it, so that no choice takes more than a smaller one.
        """
        return min(most, spared) if run_again(self.recompute) else 0

    def scores(self, heads: int, head: int, length: int) -> int:
        """Bytes of one attention's scores, which cuDNN's backward pass writes down for the sake of determinism.

        Ours does not: it is asked in fp32, and by heads of 64 where there are warpgroups. cuDNN is asked for some of
        the heads at a time there, if that costs nothing.
        """
        if not self.deterministic or self.itemsize > 2 or (self.warpgroups and head == 64):
            return 0
        if self.warpgroups:
            heads = larger_part(self.batch, heads, length, length, self.itemsize, self.warpgroups)
        return self.batch * heads * length**2 * self.itemsize


@dataclass(frozen=True, slots=True)
class Facts:
    """What headers tell: sizes for the plan, and the grid that picture sides must fit."""

    skeleton: BlockNetwork
    """The denoiser with its weights declared, none loaded."""
    weights: int
    side_multiple: int
    layers: Mapping[str, tuple[int, ...]]
    """Weight shapes of the layers an adapter may attach to, by name."""
    activation_bytes: Callable[[Load], int]
    """A prediction of what a step takes beside weights and optimizer."""
    vae: Vae
    """What turns latents into pictures, likewise."""
    text: int
    """Bytes of the text encoders, which are all there while captions are encoded."""
    longest_side: int
    """The longest side of a picture, in pixels, that the denoiser has positions for; 0: any."""

    @classmethod
    def of(
        cls, skeleton: BlockNetwork, vae: Vae, side_multiple: int, activation_bytes: Callable[[Load], int], text: int,
        longest_side: int = 0,
    ) -> Self:  # fmt: skip
        """The facts of networks whose weights are declared."""
        parts = [(n, p) for n, p in skeleton.named_modules() if isinstance(p, (nn.Linear, nn.Conv2d))]
        layers = {name: part.shapes()["weight"] for name, part in parts}
        return cls(skeleton, skeleton.num_weights(), side_multiple, layers, activation_bytes, vae, text, longest_side)


@dataclass(frozen=True, slots=True)
class Usual:
    """How pictures of a model are drawn where a config leaves it to the model: sampler steps and guidance."""

    steps: int
    guidance: float


class Family(Protocol):
    """One model family, as the training pipeline sees it."""

    @property
    def name(self) -> str:
        """ "sdxl", ..."""

    @property
    def presets(self) -> Presets:
        """LoRA target presets."""

    @property
    def foreign(self) -> tuple[str, ...]:
        """Config keys that mean nothing for it: whoever sets one is told."""

    @property
    def arrays_of(self) -> Mapping[str, tuple[str, ...]]:
        """Of each text encoder that may be silent for a sample: which arrays of a caption it makes."""

    @property
    def files(self) -> FamilyFiles:
        """Where its networks are found in files."""

    def lora_names(self, config: Config) -> LoraFamily:
        """How LoRA files name the modules of the config's model."""

    def lora_names_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LoraFamily:
        """How a LoRA file with these tensors names modules: of the model it was made for, as far as they tell."""

    def check(self, config: Config) -> Facts:
        """Reads headers only. Raises `ModelFileError` for files that are not this family's."""

    def fingerprints(self, config: Config) -> Mapping[str, str]:
        """Hashes of the networks that make `picture` and `caption` entries."""

    def caption_limit(self, config: Config) -> tuple[str, int]:
        """The config key that says how many tokens of a caption are kept, and how many that is."""

    def truncated(self, config: Config, captions: Sequence[str]) -> int:
        """How many captions are longer than what is kept."""

    def encoders(self, config: Config, device: str, want: Sequence[str]) -> AbstractContextManager[Encoders]:
        """The networks for "picture" and "caption" entries, loaded; unloaded again at the end."""

    def placement(self, placement: Placement) -> Example:
        """Conditioning that comes from a picture's size and crop alone."""

    def denoiser(self, config: Config, device: str) -> Denoiser:
        """The network to adapt, loaded in the precision of the config."""

    def decoder(self, config: Config, device: str) -> Callable[[Tensor], np.ndarray[Any, Any]]:
        """Latents (B, H, W, Z) as the denoiser sees them to uint8 pictures (B, H', W', 3)."""

    def objective(self, config: Config, device: str) -> Objective:
        """What training minimises."""

    def usual(self, config: Config) -> Usual:
        """How pictures of the config's model are drawn by default."""

    def guidance(self, config: Config) -> float:
        """The scale of classifier-free guidance in sampling; 1 for a model that is told its guidance instead."""

    def sampler(self, config: Config, size: tuple[int, int]) -> Sampler:
        """How pictures (H, W) are drawn. Raises `ConfigError` for steps that cannot be taken."""

    def latent_shape(self, config: Config, size: tuple[int, int]) -> tuple[int, int, int]:
        """(h, w, Z) of a picture (H, W)."""


def refuse_foreign(family: Family, config: Config) -> None:
    """Raises ConfigError for all keys that are set and mean nothing to the family: they must not be thought to act."""
    wrong = []
    for path in family.foreign:
        section, key = path.split(".")
        value, usual = getattr(getattr(config, section), key), keys()[path].default
        if value != usual:
            name, got = FAMILY_NAMES[family.name], toml_value(value)
            wrong.append(f"{path}: it means nothing for {name}, got {got}; remove it")
    if wrong:
        raise ConfigError("\n".join(wrong))


def base_model_path(config: Config) -> Path:
    """The checkpoint as a path; a hub id is looked up in the local cache or downloaded."""
    from flame_train.io.hub import resolve_checkpoint

    return resolve_checkpoint(config.model.checkpoint)
