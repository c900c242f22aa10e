"""SDXL: what its files, captions and conditioning are, for the training pipeline."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from flame_train.adapters.targets import UNET_PRESETS, Presets
from flame_train.config.schema import Config
from flame_train.data.buckets import Placement
from flame_train.data.tokenizers.clip import ClipTokenizer
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.samplers import ddim, euler
from flame_train.diffusion.schedules import NoiseSchedule
from flame_train.engine import Tensor, nn, tensor
from flame_train.engine.dtype import as_dtype
from flame_train.io.lora_names import LoraFamily
from flame_train.models.clip import ClipTextEncoder
from flame_train.models.keys import sdxl as keys
from flame_train.models.loading import inspect_sdxl, load_sdxl, load_vae, tensor_digest
from flame_train.models.text_sdxl import encode_prompts
from flame_train.models.unet_sdxl import UNet, UNetArch, vector_conditioning
from flame_train.models.vae import Vae, VaeArch, sample_latents
from flame_train.training.family import Denoiser, Example, Facts, Load, Sampler, base_model_path, recomputed

_LOG = logging.getLogger(__name__)
_CLIP_L_PAD, _BIGG_PAD = 49407, 0
_WINDOW = 75  # tokens of a caption's window, without begin and end


@dataclass(frozen=True, slots=True)
class SdxlEncoders:
    """SDXL's networks for pictures and captions; only those that were asked for are there."""

    vae: Vae | None
    clip_l: ClipTextEncoder | None
    bigg: ClipTextEncoder | None
    tokenizers: tuple[ClipTokenizer, ClipTokenizer]
    windows: int
    device: str

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The text encoders by component name."""
        named = {"text_encoder": self.clip_l, "text_encoder_2": self.bigg}
        return {name: network for name, network in named.items() if network is not None}

    def picture(self, pixels: np.ndarray[Any, Any]) -> Example:
        """Latent moments (H / 8, W / 8, 4), fp32, of uint8 RGB pixels (H, W, 3)."""
        assert self.vae is not None
        scaled = pixels.astype(np.float32)[None] / 127.5 - 1.0
        mean, logvar = self.vae.encode_moments(tensor(scaled, self.vae.dtype, self.device))
        return {"mean": mean.float().numpy()[0], "logvar": logvar.float().numpy()[0]}

    def caption(self, text: str) -> Example:
        """`context` (75 n + 2, 2048) and `pooled` (1280,) in the encoders' dtype."""
        assert self.clip_l is not None
        assert self.bigg is not None
        ids = [t.chunks(text, self.windows, self.windows).ids for t in self.tokenizers]
        context, pooled = encode_prompts(self.clip_l, self.bigg, ids[0][None], ids[1][None])
        return {"context": context.numpy()[0], "pooled": pooled.numpy()[0]}


class SdxlFamily:
    """The recipe; see `training.family.Family` for what each method promises."""

    name = "sdxl"
    presets: Presets = UNET_PRESETS
    foreign = (
        *(f"model.{key}" for key in ("clip_l", "clip_g", "t5", "t5_vocabulary")), "data.t5_tokens",
        *(f"data.{key}_dropout" for key in ("clip_l", "clip_g", "t5")),
        *(f"loss.{key}" for key in ("timesteps", "timestep_mean", "timestep_std", "mode_scale", "shift", "weighting")),
        "loss.guidance",
    )  # fmt: skip

    arrays_of: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def lora_names(self, config: Config) -> LoraFamily:
        return _lora_names()

    def check(self, config: Config) -> Facts:
        found = inspect_sdxl(base_model_path(config))
        if config.model.vae:
            inspect_sdxl(Path(config.model.vae), only="vae")
        arch = UNetArch.from_shapes(found["unet"])
        skeleton = UNet(arch)
        layers = {
            name: part.shapes()["weight"]
            for name, part in skeleton.named_modules()
            if isinstance(part, (nn.Linear, nn.Conv2d))
        }
        grid = 2 ** (len(arch.channel_mult) - 1) * self._downscale(found["vae"])
        return Facts(skeleton.num_weights(), grid, layers, partial(activation_bytes, arch))

    def skeleton(self, config: Config) -> nn.Module:
        return UNet(UNetArch.from_shapes(inspect_sdxl(base_model_path(config))["unet"]))

    def fingerprints(self, config: Config) -> Mapping[str, str]:
        base = base_model_path(config)
        own = bool(config.model.vae)
        vae = tensor_digest(Path(config.model.vae) if own else base, ("vae",), alone=own)
        words = "".join(t.fingerprint for t in _tokenizers(str(base)))
        text = tensor_digest(base, ("text_encoder", "text_encoder_2"))
        return {"picture": vae, "caption": hashlib.sha256((text + words).encode()).hexdigest()}

    def truncated(self, config: Config, captions: Sequence[str]) -> int:
        windows = config.data.max_tokens // _WINDOW
        tokenizer = _tokenizers(str(base_model_path(config)))[0]
        return sum(tokenizer.chunks(c, windows, windows).truncated > 0 for c in captions)

    @contextmanager
    def encoders(self, config: Config, device: str, want: Sequence[str]) -> Iterator[SdxlEncoders]:
        base = base_model_path(config)
        vae = self._vae(config, device) if "picture" in want else None
        text = ("text_encoder", "text_encoder_2") if "caption" in want else ()
        models = load_sdxl(base, device=device, dtype=config.train.precision, components=text) if text else None
        windows = config.data.max_tokens // _WINDOW
        yield SdxlEncoders(
            vae,
            models.text_encoder if models else None,
            models.text_encoder_2 if models else None,
            _tokenizers(str(base)),
            windows,
            device,
        )

    def placement(self, placement: Placement) -> Example:
        return {"time_ids": np.asarray(placement.time_ids, np.int32)}

    def denoiser(self, config: Config, device: str) -> Denoiser:
        base, dtype = base_model_path(config), as_dtype(config.train.precision)
        unet = load_sdxl(base, device=device, dtype=dtype, components=("unet",)).unet
        assert unet is not None
        unet.recompute = recomputed(config)
        return as_denoiser(unet)

    def decoder(self, config: Config, device: str) -> Callable[[Tensor], np.ndarray[Any, Any]]:
        vae = self._vae(config, device)

        def decode(latents: Tensor) -> np.ndarray[Any, Any]:
            pixels = vae.decode(latents.to(vae.dtype)).float().numpy()
            return np.rint((np.clip(pixels, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)

        return decode

    def objective(self, config: Config, device: str) -> Objective:
        return Objective(
            noise_schedule(config), config.model.prediction, snr_gamma=config.loss.snr_gamma,
            offset_noise=config.loss.offset_noise, device=device,
        )  # fmt: skip

    def guidance(self, config: Config) -> float:
        return config.sample.guidance

    def sampler(self, config: Config, size: tuple[int, int]) -> Sampler:
        s, schedule = config.sample, noise_schedule(config)
        schedule.timesteps(s.steps)
        draw = {"euler": euler, "ddim": ddim}[s.sampler]
        return partial(draw, schedule=schedule, steps=s.steps, prediction=config.model.prediction)

    def latent_shape(self, config: Config, size: tuple[int, int]) -> tuple[int, int, int]:
        shapes = inspect_sdxl(base_model_path(config))
        step = self._downscale(shapes["vae"])
        return size[0] // step, size[1] // step, UNetArch.from_shapes(shapes["unet"]).in_channels

    def _vae(self, config: Config, device: str) -> Vae:
        if config.model.vae:
            return load_vae(config.model.vae, device=device, dtype=config.model.vae_precision)
        loaded = load_sdxl(
            base_model_path(config), device=device, dtype="float32", components=("vae",),
            vae_dtype=config.model.vae_precision,
        ).vae  # fmt: skip
        assert loaded is not None
        return loaded

    @staticmethod
    def _downscale(vae_shapes: Mapping[str, tuple[int, ...]]) -> int:
        return VaeArch.from_shapes(vae_shapes).downscale


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


_lora_names = lru_cache(maxsize=1)(keys.lora_family)


@lru_cache(maxsize=2)
def _tokenizers(base: str) -> tuple[ClipTokenizer, ClipTokenizer]:
    """CLIP-L's and bigG's; of a diffusers folder its own vocabularies, else the published one."""
    folders = [Path(base) / n for n in ("tokenizer", "tokenizer_2")]
    first, second = (f if (f / "vocab.json").exists() else None for f in folders)
    return ClipTokenizer(_CLIP_L_PAD, first), ClipTokenizer(_BIGG_PAD, second)


def activation_bytes(arch: UNetArch, load: Load) -> int:
    """What a step takes beside weights and optimizer, predicted from what each kind of block saves.

    A residual block keeps the inputs of its two norms; a transformer block its three norms' inputs, the adapted
    layers' inputs, q, k, v and output of both attentions, and GEGLU's input, eight of about 19 C a position. Where
    those are recomputed only their input stays, and one layer's are there at a time; likewise with whole blocks. On
    top come the gradients of the widest layer.
    """
    pixels = load.bucket[0] * load.bucket[1] // 64
    kept = once = scores = 0
    in_layer, in_block = 8, 19
    stays = {"nothing": in_block, "feed_forward": in_block - in_layer, "blocks": 1, "blocks_offloaded": 0}
    again = {"nothing": 0, "feed_forward": in_layer, "blocks": in_block, "blocks_offloaded": in_block}
    for level, (mult, depth) in enumerate(zip(arch.channel_mult, arch.transformer_depth, strict=True)):
        positions, channels = pixels >> (2 * level), arch.model_channels * mult
        blocks = 2 * arch.num_res_blocks + 1
        kept += positions * channels * blocks * (3 + (1 + depth * stays[load.recompute] if depth else 0))
        if depth:
            once = max(once, positions * channels * (again[load.recompute] + 3 * in_layer))
            scores = max(scores, load.scores(channels // arch.head_dim, positions, positions))
    return (kept + once) * load.batch * load.itemsize + scores
