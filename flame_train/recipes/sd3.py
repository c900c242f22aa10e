"""SD3 and SD3.5: what their files, captions and conditioning are, for the training pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.targets import Presets
from flame_train.config.schema import Config
from flame_train.data.buckets import Placement
from flame_train.data.tokenizers.clip import ClipTokenizer
from flame_train.data.tokenizers.t5 import T5Tokenizer, find_vocabulary
from flame_train.diffusion.flow import FlowObjective, constant_shift, flow_euler, static_sigmas
from flame_train.engine import Tensor, nn, tensor
from flame_train.engine.dtype import as_dtype
from flame_train.errors import ConfigError
from flame_train.io.lora_names import LoraFamily
from flame_train.models.clip import ClipTextEncoder
from flame_train.models.keys import sd3 as keys
from flame_train.models.loading_sd3 import SD3_FILES
from flame_train.models.loading_t5 import inspect_t5, load_t5, t5_digest
from flame_train.models.mmdit_sd3 import Mmdit, MmditArch
from flame_train.models.t5 import T5Encoder
from flame_train.models.text_sd3 import encode_clips, joined_context
from flame_train.models.text_t5 import encode_prompts
from flame_train.models.vae import Vae, VaeArch, sample_latents
from flame_train.training.family import Denoiser, Example, Facts, Sampler, base_model_path, recomputed

_CLIP_L_PAD, _CLIP_G_PAD = 49407, 0
_CLIP_TOKENS = 75  # of a caption, without begin and end
_T5_TOKENS = 256
_SHIFT = 3.0  # of the published models' sampling
_OPTIONS: Final = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5"}

_ATTENTION: Final = ("joint_blocks.*.attn.qkv", "joint_blocks.*.attn.proj", "joint_blocks.*.attn2.*")
_MLP: Final = ("joint_blocks.*.mlp.fc[12]",)
PRESETS: Final[Presets] = MappingProxyType(
    {
        "attention": _ATTENTION,
        "attention+mlp": (*_ATTENTION, *_MLP),
        "full": ("joint_blocks.*",),
    }
)
"""`full` is every linear layer of the blocks, modulation included, as sd-scripts has it."""


@dataclass(frozen=True, slots=True)
class Sd3Encoders:
    """SD3's networks for pictures and captions; only those that were asked for are there."""

    vae: Vae | None
    clip_l: ClipTextEncoder | None
    clip_g: ClipTextEncoder | None
    t5: T5Encoder | None
    tokenizers: tuple[ClipTokenizer, ClipTokenizer]
    words: T5Tokenizer | None
    length: int
    device: str

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The text encoders by component name."""
        named = {"text_encoder": self.clip_l, "text_encoder_2": self.clip_g, "text_encoder_3": self.t5}
        return {name: network for name, network in named.items() if network is not None}

    def picture(self, pixels: np.ndarray[Any, Any]) -> Example:
        """Latent moments (H / 8, W / 8, 16), fp32, of uint8 RGB pixels (H, W, 3)."""
        assert self.vae is not None
        scaled = pixels.astype(np.float32)[None] / 127.5 - 1.0
        mean, logvar = self.vae.encode_moments(tensor(scaled, self.vae.dtype, self.device))
        return {"mean": mean.float().numpy()[0], "logvar": logvar.float().numpy()[0]}

    def caption(self, text: str) -> Example:
        """`clip` (77, 2048), `t5` (T, 4096) and `pooled` (2048,) in the encoders' dtype."""
        assert self.clip_l is not None
        assert self.clip_g is not None
        assert self.t5 is not None
        assert self.words is not None
        ids = [t.chunks(text, 1, 1).ids for t in self.tokenizers]
        clip, pooled = encode_clips(self.clip_l, self.clip_g, ids[0], ids[1])
        t5 = encode_prompts(self.t5, self.words.row(text, self.length).ids[None])
        return {"clip": clip.numpy()[0], "t5": t5.numpy()[0], "pooled": pooled.numpy()[0]}


class Sd3Family:
    """The recipe; see `training.family.Family` for what each method promises."""

    name = "sd3"
    presets: Presets = PRESETS
    foreign = ("model.prediction", "data.max_tokens", "loss.snr_gamma", "loss.zero_terminal_snr", "sample.sampler")

    def lora_names(self, config: Config) -> LoraFamily:
        return _lora_names(MmditArch.from_shapes(self._shapes(config)).depth)

    def check(self, config: Config) -> Facts:
        base = base_model_path(config)
        found = SD3_FILES.inspect(base, ["transformer"] if config.model.vae else ["transformer", "vae"])
        if config.model.vae:
            found |= SD3_FILES.inspect(config.model.vae, ["vae"])
        for component in _OPTIONS:
            self._check_encoder(config, component)
        self._words(config)
        arch = MmditArch.from_shapes(found["transformer"])
        skeleton = Mmdit(arch)
        layers = {
            name: part.shapes()["weight"]
            for name, part in skeleton.named_modules()
            if isinstance(part, (nn.Linear, nn.Conv2d))
        }
        grid = 2 * VaeArch.from_shapes(found["vae"]).downscale
        text = _CLIP_TOKENS + 2 + self._length(config)
        return Facts(skeleton.num_weights(), grid, layers, partial(activation_bytes, arch, text))

    def skeleton(self, config: Config) -> nn.Module:
        return Mmdit(MmditArch.from_shapes(self._shapes(config)))

    def fingerprints(self, config: Config) -> Mapping[str, str]:
        vae = SD3_FILES.digest(config.model.vae or base_model_path(config), ("vae",))
        text = [SD3_FILES.digest(self._place(config, c), (c,)) for c in ("text_encoder", "text_encoder_2")]
        text += [t5_digest(self._place(config, "text_encoder_3")), str(self._length(config))]
        text += [t.fingerprint for t in (*_tokenizers(str(base_model_path(config))), self._words(config))]
        return {"picture": vae, "caption": hashlib.sha256("\n".join(text).encode()).hexdigest()}

    def truncated(self, config: Config, captions: Sequence[str]) -> int:
        words, length = self._words(config), self._length(config)
        return sum(words.row(c, length).truncated > 0 for c in captions)

    @contextmanager
    def encoders(self, config: Config, device: str, want: Sequence[str]) -> Iterator[Sd3Encoders]:
        vae = self._vae(config, device) if "picture" in want else None
        clips: list[Any] = [None, None]
        t5 = words = None
        if "caption" in want:
            dtype = config.train.precision
            clips = [
                SD3_FILES.load(self._place(config, c), c, device=device, dtype=dtype)
                for c in ("text_encoder", "text_encoder_2")
            ]
            t5 = load_t5(self._place(config, "text_encoder_3"), device=device, dtype=dtype)
            words = self._words(config)
        tokenizers = _tokenizers(str(base_model_path(config)))
        yield Sd3Encoders(vae, clips[0], clips[1], t5, tokenizers, words, self._length(config), device)

    def placement(self, placement: Placement) -> Example:
        return {}

    def denoiser(self, config: Config, device: str) -> Denoiser:
        dtype = as_dtype(config.train.precision)
        transformer = SD3_FILES.load(base_model_path(config), "transformer", device=device, dtype=dtype)
        transformer.recompute = recomputed(config)
        return as_denoiser(transformer)

    def decoder(self, config: Config, device: str) -> Callable[[Tensor], np.ndarray[Any, Any]]:
        vae = self._vae(config, device)

        def decode(latents: Tensor) -> np.ndarray[Any, Any]:
            pixels = vae.decode(latents.to(vae.dtype)).float().numpy()
            return np.rint((np.clip(pixels, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)

        return decode

    def objective(self, config: Config, device: str) -> FlowObjective:
        c = config.loss
        return FlowObjective(
            "logit_normal" if c.timesteps == "auto" else c.timesteps, c.timestep_mean, c.timestep_std, c.mode_scale,
            constant_shift(c.shift or 1.0), c.weighting, c.offset_noise,
        )  # fmt: skip

    def sampler(self, config: Config, size: tuple[int, int]) -> Sampler:
        return partial(flow_euler, sigmas=static_sigmas(config.sample.steps, _SHIFT))

    def latent_shape(self, config: Config, size: tuple[int, int]) -> tuple[int, int, int]:
        found = SD3_FILES.inspect(config.model.vae or base_model_path(config), ["vae"])
        arch = VaeArch.from_shapes(found["vae"])
        return size[0] // arch.downscale, size[1] // arch.downscale, arch.latent_channels

    # ---- where things are --------------------------------------------------------------------------

    def _shapes(self, config: Config) -> Mapping[str, tuple[int, ...]]:
        return SD3_FILES.inspect(base_model_path(config), ["transformer"])["transformer"]

    def _place(self, config: Config, component: str) -> Path:
        """The file or folder of a text encoder: its own, or the checkpoint."""
        own = getattr(config.model, _OPTIONS[component])
        return Path(own) if own else base_model_path(config)

    def _check_encoder(self, config: Config, component: str) -> None:
        place, option = self._place(config, component), f"model.{_OPTIONS[component]}"
        if not getattr(config.model, _OPTIONS[component]) and component not in SD3_FILES.holds(place):
            raise ConfigError(
                f"{option}: {place} holds no such text encoder; name its file, as published beside the checkpoint"
            )
        if component == "text_encoder_3":
            inspect_t5(place)
        else:
            SD3_FILES.inspect(place, [component])

    def _words(self, config: Config) -> T5Tokenizer:
        given = config.model.t5_vocabulary
        places = [Path(given)] if given else [self._place(config, "text_encoder_3"), base_model_path(config)]
        return T5Tokenizer(find_vocabulary(places, "model.t5_vocabulary"))

    def _length(self, config: Config) -> int:
        return config.data.t5_tokens or _T5_TOKENS

    def _vae(self, config: Config, device: str) -> Vae:
        place = config.model.vae or base_model_path(config)
        vae: Vae = SD3_FILES.load(place, "vae", device=device, dtype=config.model.vae_precision)
        return vae


def as_denoiser(transformer: Mmdit) -> Denoiser:
    """A loaded transformer with SD3's conditioning and latent scale around it; times are noise levels in (0, 1)."""

    def denoise(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        return transformer(x, t * 1000.0, joined_context(cond["clip"], cond["t5"]), cond["pooled"])

    return Denoiser(transformer, "transformer", denoise, partial(sample_latents, VaeArch.sd3()))


_lora_names = lru_cache(maxsize=2)(keys.lora_family)


@lru_cache(maxsize=2)
def _tokenizers(base: str) -> tuple[ClipTokenizer, ClipTokenizer]:
    """CLIP-L's and CLIP-G's; of a diffusers folder its own vocabularies, else the published one."""
    folders = [Path(base) / n for n in ("tokenizer", "tokenizer_2")]
    first, second = (f if (f / "vocab.json").exists() else None for f in folders)
    return ClipTokenizer(_CLIP_L_PAD, first), ClipTokenizer(_CLIP_G_PAD, second)


def activation_bytes(
    arch: MmditArch, text: int, bucket: tuple[int, int], batch: int, itemsize: int, recompute: str
) -> int:
    """What a step takes beside weights and optimizer, predicted from what a joint block saves.

    A token keeps about 20 times the width a block: the stream, three modulated inputs, queries, keys and values
    before and after their norms, what attention found, and the feed-forward's 4 + 4. With blocks recomputed only the
    streams stay, and one block is whole at a time.
    """
    tokens = bucket[0] * bucket[1] // 256 + text
    in_block = 20 * tokens * arch.width
    kept = arch.depth * (tokens * arch.width if recompute == "blocks" else in_block)
    return (kept + in_block) * batch * itemsize
