"""The convolutional autoencoder between pixels and latents (AutoencoderKL, arXiv 2112.10752).

Attribute names are those of the published single file below `first_stage_model.`. Activations are
channels-last. The published weights overflow in fp16: run it in fp32 (or bf16). Qwen-Image's, made for films (Wan 2.1,
arXiv 2503.20314), has the same parts for a single image: its convolutions see nothing before their only frame.
Shape letters: B batch, H height, W width, C channels, Z latent channels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType
from flame_train.errors import ShapeError
from flame_train.networks.arch import shape_of
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import QWEN_MEAN, QWEN_STD, STATISTICS_EPS, Statistics, patched, statistic, unpatched
from flame_train.networks.vae.autoencoder_layers import (
    FilmConv,
    Level,
    Middle,
    Past,
    Shortcut,
    norm,
)

_shape: Final = partial(shape_of, "VAE", "an AutoencoderKL")


@dataclass(frozen=True, slots=True)
class VaeArch:
    """The autoencoder's shapes, and the scale and shift of its latents."""

    channels: int = 128
    channel_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2  # a level on the way down; the way up has one more
    latent_channels: int = 4
    scaling_factor: float = 0.13025  # a diffusion model's latents are this times the autoencoder's less the shift
    shift_factor: float = 0.0
    quant_convs: bool = True  # a 1 x 1 convolution on either side of the latents
    groups: int = 32  # of the norms; 0: RMS norms of a pixel's channels, and upsampling halves the channels
    latents_mean: tuple[float, ...] = ()  # of each channel; where given, the diffusion model sees normalised latents
    latents_std: tuple[float, ...] = ()
    patch: int = 1  # the side of the square of latent pixels that the diffusion model sees as one, normalised
    decoder_channels: int = 0  # of the decoder's finest level; 0: as many as the encoder's
    pixel_channels: int = 3  # 4: with an alpha channel, which is opaque when encoded and left out when decoded
    pixel_patch: int = 1  # the side of the square of pixels that the encoder's first layer sees as one
    frames: tuple[int, ...] = ()  # for levels with shortcuts: how many frames of a film each halving joins
    taps: int = 1  # frames that a convolution sees; 1: it takes stills alone

    @classmethod
    def sdxl(cls) -> Self:
        """Returns SDXL's architecture."""
        return cls()

    @classmethod
    def sd(cls) -> Self:
        """Returns that of SD 1 and 2: SDXL's, with another scaling factor."""
        return cls(scaling_factor=0.18215)

    @classmethod
    def sd3(cls) -> Self:
        """Returns SD3's and SD3.5's, with 16 latent channels."""
        return cls(latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609, quant_convs=False)

    @classmethod
    def flux(cls) -> Self:
        """Returns Flux.1's: SD3's structure with other weights."""
        return cls(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159, quant_convs=False)

    @classmethod
    def flux2(cls) -> Self:
        """Returns Flux.2's: squares of four pixels, normalised by the mean and variance of a channel in its file."""
        return cls(latent_channels=32, scaling_factor=1.0, patch=2)

    @classmethod
    def qwen_image(cls) -> Self:
        """Returns Qwen-Image's, of Wan 2.1's shapes: Krea 2's and Anima's too."""
        return cls(
            channels=96,
            latent_channels=16,
            scaling_factor=1.0,
            groups=0,
            latents_mean=QWEN_MEAN,
            latents_std=QWEN_STD,
        )

    @classmethod
    def tiny_qwen_image(cls) -> Self:
        """Returns the structure of Qwen-Image's, small enough for a CPU."""
        return replace(cls.qwen_image(), channels=8, num_res_blocks=1)

    @classmethod
    def tiny(cls, channels: int = 16, latent_channels: int = 4) -> Self:
        """Returns the same structure, small enough for a CPU; of 16 latent channels as Flux.1's, of 32 as Flux.2's."""
        return cls(
            channels=channels,
            num_res_blocks=1,
            latent_channels=latent_channels,
            quant_convs=latent_channels != 16,
            groups=_groups(channels),
            scaling_factor=1.0 if latent_channels == 32 else 0.13025,
            patch=2 if latent_channels == 32 else 1,
        )

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], published: VaeArch | None = None, stated: Stated = NOTHING
    ) -> VaeArch:
        """Returns the architecture of a file's autoencoder, from its native names and shapes.

        Scale and shift are those of `published`, the family's own, by default SDXL's. Raises ModelFileError naming the
        tensor it looked for in vain, or what the folder states otherwise.
        """
        known = published or cls()
        if known.latents_mean:
            mean, std = (statistic(stated, key, getattr(known, key)) for key in ("latents_mean", "latents_std"))
            known = replace(known, latents_mean=mean, latents_std=std)
            stated.require(attn_scales=[], input_channels=3)
        else:
            stated.require(latents_mean=None, latents_std=None, mid_block_add_attention=True)
        if known.frames:
            channels, joins = known.patched_channels, [frames > 1 for frames in known.frames]
            stated.require(is_residual=True, in_channels=channels, out_channels=channels, temperal_downsample=joins)
        patch = (2, 2) if not known.frames else known.pixel_patch if known.pixel_patch > 1 else None
        stated.require(
            scaling_factor=known.scaling_factor, act_fn="silu", patch_size=patch, batch_norm_eps=STATISTICS_EPS
        )
        if stated.values.get("shift_factor") is not None:
            stated.require(shift_factor=known.shift_factor)
        blocks = [m for n in shapes if (m := re.match(r"encoder\.down\.(\d+)\.block\.(\d+)\.", n))]
        levels = sorted({int(m[1]) for m in blocks})
        channels = _shape(shapes, "encoder.conv_in.weight")[0] // known.taps
        finest = _shape(shapes, "decoder.conv_out.weight")[1]
        widths = [_shape(shapes, f"encoder.down.{i}.block.0.conv1.weight")[0] // known.taps for i in levels]
        return replace(
            known,
            channels=channels,
            channel_mult=tuple(w // channels for w in widths),
            num_res_blocks=max((int(m[2]) for m in blocks), default=-1) + 1,
            latent_channels=_shape(shapes, "decoder.conv_in.weight")[1],
            quant_convs="quant_conv.weight" in shapes,
            groups=known.groups and int(stated.number("norm_num_groups", _groups(channels))),
            patch=2 if "bn.running_mean" in shapes else 1,
            decoder_channels=0 if finest == channels else finest,
        )

    @property
    def normalised(self) -> bool:
        """Whether the diffusion model sees latents less their mean, over their standard deviation."""
        return self.patch > 1 or bool(self.latents_mean)

    @property
    def downscale(self) -> int:
        """Pixels a latent pixel stands for, along each side: 8 for the published one."""
        return self.patch * self.pixel_patch << (len(self.channel_mult) - 1)

    @property
    def frame_stride(self) -> int:
        """How many frames of a film one of latents stands for, but for the first; 0: it takes stills alone."""
        return math.prod(self.frames) if self.taps > 1 else 0

    @property
    def patched_channels(self) -> int:
        """Numbers of what the encoder's first layer sees as a pixel."""
        return self.pixel_channels * self.pixel_patch**2

    @property
    def seen_channels(self) -> int:
        """Channels of the latents as the diffusion model sees them."""
        return self.latent_channels * self.patch**2

    def latent_shape(self, pixels: tuple[int, ...]) -> tuple[int, ...]:
        """Returns (h, w, Z) for pixels (H, W), or (f, h, w, Z) for (F, H, W): the first frame has latents of its own.

        A number of frames between two that fill their latents counts as the lower.
        """
        *frames, height, width = pixels
        stood_for = (1 + (frames[0] - 1) // self.frame_stride,) if frames else ()
        return *stood_for, height // self.downscale, width // self.downscale, self.seen_channels

    def shortcut(self, channels: int, level: int, halves: bool) -> Shortcut | None:
        """Returns what leads around a level to so many channels.

        `halves`: the one below has half its height and width.
        """
        return Shortcut(channels, 1 + halves, self.frames[level] if halves else 1) if self.frames else None


def _groups(channels: int) -> int:
    """Returns the family's 32 groups, less in narrower networks, where the folder does not state them."""
    return min(32, channels // 4)


class Encoder(nn.Module):
    """Pixels to the moments of the latents, before `quant_conv`."""

    def __init__(self, arch: VaeArch) -> None:
        widths = [arch.channels * m for m in arch.channel_mult]
        self.conv_in = FilmConv(arch.patched_channels, arch.channels, 3, arch.taps, padding=1)
        self.down = nn.ModuleList()
        before = arch.channels
        for i, width in enumerate(widths):
            down = i + 1 < len(widths)
            shortcut = arch.shortcut(width, i, down)
            around = shortcut.down if shortcut else None
            frames = arch.frames[i] if arch.frames and down else 1
            sizes = before, width, arch.num_res_blocks, arch.groups
            self.down.append(Level(*sizes, down=down, around=around, taps=arch.taps, frames=frames))
            before = width
        self.mid = Middle(before, arch.groups, arch.taps)
        self.norm_out = norm(arch.groups, before)
        self.conv_out = FilmConv(before, 2 * arch.latent_channels, 3, arch.taps, padding=1)

    def forward(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        h_BHWC = self.conv_in(x_BHWC, past)
        for level in self.down:
            h_BHWC = level(h_BHWC, past)
        return self.conv_out(self.norm_out(self.mid(h_BHWC, past)), past)


class Decoder(nn.Module):
    """Latents, after `post_quant_conv`, to pixels. Levels are numbered as the encoder's: 0 is the finest."""

    def __init__(self, arch: VaeArch) -> None:
        finest = arch.decoder_channels or arch.channels
        widths = [finest * m for m in arch.channel_mult]
        self.conv_in = FilmConv(arch.latent_channels, widths[-1], 3, arch.taps, padding=1)
        self.mid = Middle(widths[-1], arch.groups, arch.taps)
        levels, before = [], widths[-1]
        for i, width in reversed(list(enumerate(widths))):
            after = 0 if i == 0 else width if arch.groups or arch.frames else width // 2
            shortcut = arch.shortcut(width, i - 1, True) if i else None
            around = shortcut.up if shortcut else None
            frames = arch.frames[i - 1] if arch.frames and i else 1
            sizes = before, width, arch.num_res_blocks + 1, arch.groups
            levels.append(Level(*sizes, up=after, around=around, taps=arch.taps, frames=frames))
            before = after
        self.up = nn.ModuleList(levels[::-1])
        self.norm_out = norm(arch.groups, finest)
        self.conv_out = FilmConv(finest, arch.patched_channels, 3, arch.taps, padding=1)

    def forward(self, z_BHWZ: Tensor, past: Past | None = None) -> Tensor:
        h_BHWC = self.mid(self.conv_in(z_BHWZ, past), past)
        for level in reversed(list(self.up)):
            h_BHWC = level(h_BHWC, past)
        return self.conv_out(self.norm_out(h_BHWC), past)


class Vae(nn.Module):
    """Encoder, decoder and the scale of the latents between them."""

    def __init__(self, arch: VaeArch) -> None:
        self.arch = arch
        self.encoder = Encoder(arch)
        self.decoder = Decoder(arch)
        if arch.quant_convs:
            self.quant_conv = nn.Conv2d(2 * arch.latent_channels, 2 * arch.latent_channels, 1)
            self.post_quant_conv = nn.Conv2d(arch.latent_channels, arch.latent_channels, 1)
        if arch.patch > 1:
            self.bn = Statistics(arch.seen_channels)
        self._known: tuple[Tensor, Tensor] | None = None  # a captured call cannot bring them from the host

    @property
    def dtype(self) -> DType:
        """The dtype of its pixels and latents."""
        return nn.compute_copy(self.decoder.conv_in.weight).dtype

    def encode_moments(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log variance (B, H / 8, W / 8, Z), unscaled, of RGB pixels (B, H, W, 3) in [-1, 1].

        H and W must be multiples of `arch.downscale`. The log variance is held within [-30, 20]. Where latents are
        patched, both are those of the normalised patches, (B, H / 16, W / 16, 4 Z). Of a film (B, F, H, W, 3) they
        have an axis of frames, too: one for the first frame, and one for each `arch.frame_stride` further ones.
        """
        if pixels.ndim == 4:
            return self._moments(pixels)

        def beside(chunk_NHWC: Tensor, past: Past | None) -> Tensor:
            return F.cat(list(self._moments(chunk_NHWC, past)), dim=-1)

        mean, logvar = F.chunk(self._in_chunks(beside, pixels, self.arch.frame_stride), 2, dim=-1)
        return mean, logvar

    def _moments(self, pixels_BHWC: Tensor, past: Past | None = None) -> tuple[Tensor, Tensor]:
        if self.arch.pixel_channels > 3:
            pixels_BHWC = F.pad(pixels_BHWC, (0, self.arch.pixel_channels - 3), value=1.0)
        moments = self.encoder(patched(pixels_BHWC, self.arch.pixel_patch, by_column=True), past)
        mean, logvar = F.chunk(self.quant_conv(moments) if self.arch.quant_convs else moments, 2, dim=-1)
        logvar = logvar.clamp(-30.0, 20.0)
        if not self.arch.normalised:
            return mean, logvar
        center, spread = self._statistics()
        mean, logvar = (patched(x, self.arch.patch) for x in (mean, logvar))
        return (mean - center) / spread, logvar - 2.0 * spread.log()

    def _in_chunks(self, made: Callable[[Tensor, Past | None], Tensor], x: Tensor, frames: int) -> Tensor:
        """Returns `made` of a film's first frame, then of each so many, one after the other."""
        B, count = x.shape[:2]
        if count == 1:
            return made(x[:, 0], None).unsqueeze(1)
        if not frames or (count - 1) % frames:
            raise ShapeError(f"VAE: expected a film of 1 frame and a multiple of {frames}, got {count} frames")
        past, chunks = Past(B), list[Tensor]()
        for begin in (0, *range(1, count, frames)):
            chunk = x[:, begin : begin + (frames if begin else 1)]
            out = made(chunk.reshape(-1, *chunk.shape[2:]), past)
            chunks.append(out.reshape(B, -1, *out.shape[1:]))
            past.first = False
        return F.cat(chunks, dim=1)

    def decode(self, latents: Tensor) -> Tensor:
        """RGB pixels, about [-1, 1] and not clamped, of latents (B, H, W, Z) as the diffusion model sees them.

        Of a film's latents (B, F, H, W, Z) they have an axis of frames, too.
        """
        if latents.ndim == 4:
            return self._pixels(latents)
        return self._in_chunks(self._pixels, latents, min(1, self.arch.frame_stride))

    def _pixels(self, latents_BHWZ: Tensor, past: Past | None = None) -> Tensor:
        if self.arch.normalised:
            center, spread = self._statistics()
            latents_BHWZ = unpatched(latents_BHWZ * spread + center, self.arch.patch)
        z_BHWZ = unscaled_latents(self.arch, latents_BHWZ)
        made_BHWC = self.decoder(self.post_quant_conv(z_BHWZ) if self.arch.quant_convs else z_BHWZ, past)
        pixels_BHWC = unpatched(made_BHWC, self.arch.pixel_patch, by_column=True)
        return pixels_BHWC[..., :3] if self.arch.pixel_channels > 3 else pixels_BHWC

    def _statistics(self) -> tuple[Tensor, Tensor]:
        if self.arch.patch > 1:
            return self.bn.scale()
        if self._known is None:
            like = nn.compute_copy(self.decoder.conv_in.weight)
            mean, std = (np.array(values) for values in (self.arch.latents_mean, self.arch.latents_std))
            self._known = tensor(mean, like.dtype, like.device), tensor(std, like.dtype, like.device)
        return self._known


def sample_latents(arch: VaeArch, moments: tuple[Tensor, Tensor], noise_BHWZ: Tensor) -> Tensor:
    """(mean + std * noise - shift) * scale: latents as the diffusion model of the autoencoder's family sees them."""
    mean, logvar = moments
    return scaled_latents(arch, mean + (logvar * 0.5).exp() * noise_BHWZ)


def unscaled_latents(arch: VaeArch, latents_BHWZ: Any) -> Any:
    """z of `scaled_latents`, a tensor or an array."""
    z_BHWZ = latents_BHWZ * (1.0 / arch.scaling_factor)
    return z_BHWZ + arch.shift_factor if arch.shift_factor else z_BHWZ


def scaled_latents(arch: VaeArch, z_BHWZ: Any) -> Any:
    """Returns (z - shift) * scale: latents, a tensor or an array, as the autoencoder's diffusion model sees them."""
    return (z_BHWZ - arch.shift_factor if arch.shift_factor else z_BHWZ) * arch.scaling_factor
