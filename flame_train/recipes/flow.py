"""Families that are trained by rectified flow, with CLIP and T5 beside a transformer: what SD3 and Flux share.

A family of this kind is a value, `FlowFamily`, that names its files, its conditioning and its conventions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.targets import Presets
from flame_train.config.schema import Config
from flame_train.data.buckets import Placement
from flame_train.data.tokenizers.clip import ClipTokenizer, clip_tokenizers
from flame_train.data.tokenizers.t5 import T5Tokenizer, find_vocabulary, named_vocabulary
from flame_train.diffusion.flow import FlowObjective, Shift, constant_shift, flow_euler
from flame_train.engine import Tensor, nn
from flame_train.engine.dtype import as_dtype
from flame_train.errors import ConfigError
from flame_train.io.lora_names import LoraFamily
from flame_train.models.family_files import FamilyFiles
from flame_train.models.loading_t5 import inspect_t5, load_t5, t5_digest
from flame_train.models.recompute import BlockNetwork, Recompute
from flame_train.models.vae import Vae, VaeArch, sample_latents
from flame_train.training.family import Denoiser, Example, Facts, Load, Sampler, Usual, base_model_path
from flame_train.training.recompute import recomputed
from flame_train.training.step import Denoise

from .pixels import decoder, lacks, moments, vae_place

PATCH = 2  # the side of a token in latent pixels
CLIP_TOKENS = 77  # the length of a CLIP's input, begin and end included

Ids = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class FlowFamily:
    """The recipe; see `training.family.Family` for what each method promises.

    `encoders_of` are the text encoders: component -> the config key under `model` that may name a file of its own;
    `clips` are those with CLIP's vocabulary: component -> padding token; `t5` is the one with T5's. The context has
    `clip_tokens` and then T5's, of which there are `t5_tokens` unless the config says otherwise. `conditioning` makes
    a caption's arrays of (networks, ids, each by component). `denoise` makes the step's function of (transformer,
    guidance); a model that is told its guidance, `guides_itself`, needs no classifier-free one. `sigmas` gives the
    noise levels of sampling in (transformer, steps, image tokens), `shift` that of training. `drawn` says how pictures
    are drawn by default, `positions` how many tokens a side may have, 0 for any number. `activations` is
    (transformer, text tokens, load) -> bytes. Wherever a transformer is asked for a number, it has no weights.
    """

    name: str
    presets: Presets
    files: FamilyFiles
    clip_tokens: int
    published_vae: VaeArch
    encoders_of: Mapping[str, str]
    clips: Mapping[str, int]
    t5: str
    t5_tokens: Callable[[nn.Module], int]
    conditioning: Callable[[Mapping[str, Any], Ids], Mapping[str, Tensor]]
    denoise: Callable[[Any, float], Denoise]
    lora_family: Callable[[Any], LoraFamily]
    lora_names_in: Callable[[Mapping[str, tuple[int, ...]]], LoraFamily]
    shift: Shift
    sigmas: Callable[[nn.Module, int, int], np.ndarray[Any, Any]]
    activations: Callable[[Any, int, Load], int]
    guides_itself: Callable[[nn.Module], bool]
    drawn: Callable[[Any], Usual]
    positions: Callable[[Any], int]
    arrays_of: Mapping[str, tuple[str, ...]]
    foreign: tuple[str, ...]

    def lora_names(self, config: Config) -> LoraFamily:
        return self.lora_family(self._skeleton(config))

    def check(self, config: Config) -> Facts:
        self._refuse_lacking(config)
        pixels = self._empty_vae(config)
        encoders = sum(self._encoder_bytes(config, component) for component in self.encoders_of)
        self._words(config)
        skeleton = self._skeleton(config)
        foreign = "loss.guidance" in self.foreign  # then it is refused as such
        if config.loss.guidance != 1.0 and not foreign and not self.guides_itself(skeleton):
            raise ConfigError(f"loss.guidance: this model is told none, got {config.loss.guidance}; remove it")
        text = self._length(config) + self.clip_tokens
        activations = partial(self.activations, skeleton, text)
        token = PATCH * pixels.arch.downscale
        return Facts.of(skeleton, pixels, token, activations, encoders, token * self.positions(skeleton))

    def fingerprints(self, config: Config) -> Mapping[str, str]:
        vae = self.files.digest(vae_place(config, self.files), ("vae",))
        text = [self.files.digest(self._place(config, c), (c,)) for c in self.clips]
        text += ["t5 in fp8"] * config.model.t5_fp8 + [t5_digest(self._place(config, self.t5))]
        text += [str(self._length(config)), self._words(config).fingerprint]
        text += [tokenizer.fingerprint for tokenizer in self._tokenizers(config).values()]
        return {"picture": vae, "caption": hashlib.sha256("\n".join(text).encode()).hexdigest()}

    def caption_limit(self, config: Config) -> tuple[str, int]:
        return "data.t5_tokens", self._length(config)

    def truncated(self, config: Config, captions: Sequence[str]) -> int:
        words, length = self._words(config), self._length(config)
        return sum(words.row(c, length).truncated > 0 for c in captions)

    @contextmanager
    def encoders(self, config: Config, device: str, want: Sequence[str]) -> Iterator[FlowEncoders]:
        dtype = config.train.precision
        vae = self._vae(config, device) if "picture" in want else None
        networks: dict[str, nn.Module] = {}
        if "caption" in want:
            for component in self.clips:
                place = self._place(config, component)
                networks[component] = self.files.load(place, component, device=device, dtype=dtype)
            networks[self.t5] = load_t5(self._place(config, self.t5), device=device, dtype=dtype, fp8=_t5_fp8(config))
        yield FlowEncoders(
            vae, networks, self._tokenizers(config), self._words(config), self._length(config), self, device
        )

    def placement(self, placement: Placement) -> Example:
        return {}

    def denoiser(self, config: Config, device: str) -> Denoiser:
        dtype = as_dtype(config.train.precision)
        transformer: Any = self.files.load(
            base_model_path(config), "transformer", device=device, dtype=dtype, fp8=config.model.fp8
        )
        transformer.recompute_only(*recomputed(config, transformer))
        return Denoiser(
            transformer, "transformer", self.denoise(transformer, config.loss.guidance),
            partial(sample_latents, self.published_vae), self.denoise(transformer, config.sample.guidance),
        )  # fmt: skip

    def decoder(self, config: Config, device: str) -> Callable[[Tensor], np.ndarray[Any, Any]]:
        return decoder(self._vae(config, device))

    def objective(self, config: Config, device: str) -> FlowObjective:
        c = config.loss
        return FlowObjective(
            "logit_normal" if c.timesteps == "auto" else c.timesteps, c.timestep_mean, c.timestep_std, c.mode_scale,
            constant_shift(c.shift) if c.shift else self.shift, c.weighting, c.offset_noise, PATCH,
        )  # fmt: skip

    def sampler(self, config: Config, size: tuple[int, int]) -> Sampler:
        h, w, _ = self.latent_shape(config, size)
        sigmas = self.sigmas(self._skeleton(config), config.sample.steps, h * w // PATCH**2)
        return partial(flow_euler, sigmas=sigmas)

    def usual(self, config: Config) -> Usual:
        return self.drawn(self._skeleton(config))

    def guidance(self, config: Config) -> float:
        return 1.0 if self.guides_itself(self._skeleton(config)) else config.sample.guidance

    def latent_shape(self, config: Config, size: tuple[int, int]) -> tuple[int, int, int]:
        arch = self._empty_vae(config).arch
        return size[0] // arch.downscale, size[1] // arch.downscale, arch.latent_channels

    # ---- where things are --------------------------------------------------------------------------

    def _skeleton(self, config: Config) -> BlockNetwork:
        """The transformer with its weights declared, none loaded."""
        transformer: BlockNetwork = self.files.inspect(base_model_path(config), ["transformer"])["transformer"]
        return transformer

    def _empty_vae(self, config: Config) -> Vae:
        vae: Vae = self.files.inspect(vae_place(config, self.files), ["vae"])["vae"]
        return vae

    def _place(self, config: Config, component: str) -> Path:
        """The file or folder of a text encoder: its own, or the checkpoint."""
        own = getattr(config.model, self.encoders_of[component])
        return Path(own) if own else base_model_path(config)

    def _refuse_lacking(self, config: Config) -> None:
        """Raises ConfigError with every network that has no file of its own and that the checkpoint does not hold."""
        base = base_model_path(config)
        held, options = self.files.holds(base), {"vae": "vae", **self.encoders_of}
        wanted = [option for part, option in options.items() if part not in held]
        if lacking := [lacks(base, option) for option in wanted if not getattr(config.model, option)]:
            raise ConfigError("\n".join(lacking))

    def _encoder_bytes(self, config: Config, component: str) -> int:
        """What a text encoder takes, whose weights are all where they should be."""
        place, item = self._place(config, component), as_dtype(config.train.precision).itemsize
        if component == self.t5:
            return inspect_t5(place).weight_bytes(item, _t5_fp8(config))
        encoder: nn.Module = self.files.inspect(place, [component])[component]
        return encoder.weight_bytes(item)

    def _words(self, config: Config) -> T5Tokenizer:
        given, option = config.model.t5_vocabulary, "model.t5_vocabulary of a config, --t5-vocabulary of sample"
        if given:
            return T5Tokenizer(named_vocabulary(Path(given), option))
        return T5Tokenizer(find_vocabulary([self._place(config, self.t5), base_model_path(config)], option))

    def _tokenizers(self, config: Config) -> Mapping[str, ClipTokenizer]:
        return clip_tokenizers(base_model_path(config), self.clips)

    def _length(self, config: Config) -> int:
        return config.data.t5_tokens or self.t5_tokens(self._skeleton(config))

    def _vae(self, config: Config, device: str) -> Vae:
        place = vae_place(config, self.files)
        vae = self.files.load(place, "vae", device=device, dtype=config.model.vae_precision)
        assert isinstance(vae, Vae)
        return vae


def _t5_fp8(config: Config) -> nn.Fp8:
    return "weights" if config.model.t5_fp8 else "off"


@dataclass(frozen=True, slots=True)
class FlowEncoders:
    """The networks for pictures and captions; only those that were asked for are there."""

    vae: Vae | None
    networks: Mapping[str, nn.Module]
    tokenizers: Mapping[str, ClipTokenizer]
    words: T5Tokenizer
    length: int
    family: FlowFamily
    device: str

    def picture(self, pixels: np.ndarray[Any, Any]) -> Example:
        """Latent moments (H / 8, W / 8, 16), fp32, of uint8 RGB pixels (H, W, 3)."""
        assert self.vae is not None
        return moments(self.vae, pixels, self.device)

    def caption(self, text: str) -> Example:
        """The family's conditioning arrays, in the encoders' dtype."""
        ids = {component: t.chunks(text, 1, 1).ids for component, t in self.tokenizers.items()}
        ids[self.family.t5] = self.words.row(text, self.length).ids[None]
        made = self.family.conditioning(self.networks, ids)
        return {name: t.numpy()[0] for name, t in made.items()}


def joint_activations(load: Load, kept: float, passing: float, width: int, head_dim: int, tokens: int) -> int:
    """What a step takes beside weights and optimizer, predicted for a transformer with joint attention.

    `kept` is what all blocks save for the backward pass, in numbers a token over the model's width, and `passing` what
    comes and goes with the gradients of one block. On the host it is what waits for offloaded blocks.
    """
    unit = tokens * width * load.batch * load.itemsize
    return round((kept + passing) * unit) + load.scores(width // head_dim, head_dim, tokens)


DOUBLE_KEEPS: Mapping[Recompute, int] = {"nothing": 13, "feed_forward": 9, "blocks": 1, "blocks_offloaded": 0}
"""Of a block with a stream each for picture and text, over the model's width, a token: the stream before and after
attention, queries, keys and values before their norms and after, what attention found, and the feed-forward's 4. What
linear layers are given is made again."""


GATES_KEEP: Mapping[Recompute, int] = {"nothing": 2, "feed_forward": 1, "blocks": 0, "blocks_offloaded": 0}
"""Of such a block, what its gates multiply: what attention and feed-forward give, for the gates' gradients."""


def gates_learn(load: Load, maker: str, told: tuple[str, ...]) -> bool:
    """Whether the gates that the layer `maker` makes get gradients: where it has a LoRA, or what it is given does.

    The names of the layers that make this begin as in `told`.
    """
    return maker in load.adapted or any(name.startswith(told) for name in load.adapted)
