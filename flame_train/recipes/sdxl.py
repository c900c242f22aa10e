"""SDXL: what its files, captions and conditioning are, for the training pipeline."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from flame_train.adapters.targets import UNET_PRESETS, Presets
from flame_train.config.schema import Config
from flame_train.data.buckets import Placement
from flame_train.data.tokenizers.clip import ClipTokenizer, clip_tokenizers
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.samplers import ddim, euler
from flame_train.diffusion.schedules import NoiseSchedule
from flame_train.engine import Tensor
from flame_train.engine.dtype import as_dtype
from flame_train.errors import ConfigError
from flame_train.io.lora_names import LoraFamily
from flame_train.models.clip import ClipTextEncoder
from flame_train.models.keys import sdxl as keys
from flame_train.models.loading_sdxl import SDXL_FILES, stated_prediction
from flame_train.models.text_sdxl import encode_prompts
from flame_train.models.unet_sdxl import UNet, vector_conditioning
from flame_train.models.vae import Vae, VaeArch, sample_latents
from flame_train.training.family import Denoiser, Example, Facts, Sampler, Usual, base_model_path
from flame_train.training.recompute import recomputed

from .memory_sdxl import activation_bytes
from .pixels import decoder, moments, vae_place

_LOG = logging.getLogger(__name__)
_CLIPS = MappingProxyType({"text_encoder": 49407, "text_encoder_2": 0})  # with what they fill up short captions
_WINDOW = 75  # tokens of a caption's window, without begin and end


@dataclass(frozen=True, slots=True)
class SdxlEncoders:
    """SDXL's networks for pictures and captions; only those that were asked for are there."""

    vae: Vae | None
    networks: Mapping[str, ClipTextEncoder]
    tokenizers: Mapping[str, ClipTokenizer]
    windows: int
    device: str

    def picture(self, pixels: np.ndarray[Any, Any]) -> Example:
        """Latent moments (H / 8, W / 8, 4), fp32, of uint8 RGB pixels (H, W, 3)."""
        assert self.vae is not None
        return moments(self.vae, pixels, self.device)

    def caption(self, text: str) -> Example:
        """`context` (75 n + 2, 2048) and `pooled` (1280,) in the encoders' dtype."""
        first, second = (self.tokenizers[c].chunks(text, self.windows, self.windows).ids[None] for c in _CLIPS)
        clip_l, bigg = (self.networks[c] for c in _CLIPS)
        context, pooled = encode_prompts(clip_l, bigg, first, second)
        return {"context": context.numpy()[0], "pooled": pooled.numpy()[0]}


class SdxlFamily:
    """The recipe; see `training.family.Family` for what each method promises."""

    name = "sdxl"
    presets: Presets = UNET_PRESETS
    files = SDXL_FILES
    foreign = (
        *(f"model.{key}" for key in ("clip_l", "clip_g", "t5", "t5_vocabulary", "t5_fp8")), "data.t5_tokens",
        *(f"data.{key}_dropout" for key in ("clip_l", "clip_g", "t5")),
        *(f"loss.{key}" for key in ("timesteps", "timestep_mean", "timestep_std", "mode_scale", "shift", "weighting")),
        "loss.guidance",
    )  # fmt: skip

    arrays_of: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def lora_names(self, config: Config) -> LoraFamily:
        return keys.lora_family()

    def lora_names_in(self, shapes: Mapping[str, tuple[int, ...]]) -> LoraFamily:
        return keys.lora_family()

    def check(self, config: Config) -> Facts:
        _check_prediction(config)
        own = ["vae"] if vae_place(config, SDXL_FILES) == base_model_path(config) else []
        found = SDXL_FILES.inspect(base_model_path(config), ["unet", *own, *_CLIPS])
        unet, pixels = found["unet"], found["vae"] if own else self._empty_vae(config)
        grid = 2 ** (len(unet.arch.channel_mult) - 1) * pixels.arch.downscale
        text = sum(found[c].weight_bytes(as_dtype(config.train.precision).itemsize) for c in _CLIPS)
        return Facts.of(unet, pixels, grid, partial(activation_bytes, unet), text)

    def fingerprints(self, config: Config) -> Mapping[str, str]:
        base = base_model_path(config)
        words = "".join(tokenizer.fingerprint for tokenizer in self._tokenizers(config).values())
        text = SDXL_FILES.digest(base, _CLIPS)
        return {
            "picture": SDXL_FILES.digest(vae_place(config, SDXL_FILES), ("vae",)),
            "caption": hashlib.sha256((text + words).encode()).hexdigest(),
        }

    def caption_limit(self, config: Config) -> tuple[str, int]:
        return "data.max_tokens", config.data.max_tokens

    def truncated(self, config: Config, captions: Sequence[str]) -> int:
        windows = config.data.max_tokens // _WINDOW
        tokenizer = self._tokenizers(config)["text_encoder"]
        return sum(tokenizer.chunks(c, windows, windows).truncated > 0 for c in captions)

    @contextmanager
    def encoders(self, config: Config, device: str, want: Sequence[str]) -> Iterator[SdxlEncoders]:
        base, dtype = base_model_path(config), config.train.precision
        vae = self._vae(config, device) if "picture" in want else None
        clips = _CLIPS if "caption" in want else ()
        networks = {c: SDXL_FILES.load(base, c, device=device, dtype=dtype) for c in clips}
        yield SdxlEncoders(vae, networks, self._tokenizers(config), config.data.max_tokens // _WINDOW, device)

    def placement(self, placement: Placement) -> Example:
        return {"time_ids": np.asarray(placement.time_ids, np.int32)}

    def denoiser(self, config: Config, device: str) -> Denoiser:
        unet: UNet = SDXL_FILES.load(
            base_model_path(config), "unet", device=device, dtype=as_dtype(config.train.precision), fp8=config.model.fp8
        )
        unet.recompute_only(*recomputed(config, unet))
        return as_denoiser(unet)

    def decoder(self, config: Config, device: str) -> Callable[[Tensor], np.ndarray[Any, Any]]:
        return decoder(self._vae(config, device))

    def objective(self, config: Config, device: str) -> Objective:
        return Objective(
            noise_schedule(config), config.model.prediction, snr_gamma=config.loss.snr_gamma,
            offset_noise=config.loss.offset_noise, device=device,
        )  # fmt: skip

    def usual(self, config: Config) -> Usual:
        return Usual(20, 7.0)

    def guidance(self, config: Config) -> float:
        return config.sample.guidance

    def sampler(self, config: Config, size: tuple[int, int]) -> Sampler:
        s, schedule = config.sample, noise_schedule(config)
        schedule.timesteps(s.steps)
        draw = {"euler": euler, "ddim": ddim}[s.sampler]
        return partial(draw, schedule=schedule, steps=s.steps, prediction=config.model.prediction)

    def latent_shape(self, config: Config, size: tuple[int, int]) -> tuple[int, int, int]:
        arch = self._empty_vae(config).arch
        return size[0] // arch.downscale, size[1] // arch.downscale, arch.latent_channels

    def _vae(self, config: Config, device: str) -> Vae:
        place, dtype = vae_place(config, SDXL_FILES), config.model.vae_precision
        vae: Vae = SDXL_FILES.load(place, "vae", device=device, dtype=dtype)
        return vae

    def _empty_vae(self, config: Config) -> Vae:
        vae: Vae = SDXL_FILES.inspect(vae_place(config, SDXL_FILES), ["vae"])["vae"]
        return vae

    def _tokenizers(self, config: Config) -> Mapping[str, ClipTokenizer]:
        return clip_tokenizers(base_model_path(config), _CLIPS)


def _check_prediction(config: Config) -> None:
    """A model trained on the other target loses what it knows, and no number of the log tells."""
    base, given = base_model_path(config), config.model.prediction
    said = stated_prediction(base)
    if said and said != given:
        raise ConfigError(
            f'model.prediction: {base} says that it predicts {said}, got "{given}"; set model.prediction = "{said}" '
            f"(in sample: --prediction {said})"
        )


def noise_schedule(config: Config) -> NoiseSchedule:
    """The model's noise schedule, with zero terminal SNR if asked for."""
    schedule = NoiseSchedule.scaled_linear()
    return schedule.zero_terminal_snr() if config.loss.zero_terminal_snr else schedule


def as_denoiser(unet: UNet) -> Denoiser:
    """A loaded UNet with SDXL's conditioning and latent scale around it."""
    vae = VaeArch.sdxl()

    def denoise(x: Tensor, t: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        vector = vector_conditioning(cond["pooled"], cond["time_ids"])
        return unet(x, t, cond["context"], vector)

    return Denoiser(unet, "unet", denoise, partial(sample_latents, vae))
