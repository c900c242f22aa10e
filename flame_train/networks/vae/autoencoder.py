"""The autoencoder of a model: images to latents, and back, in fp32 or as `model.vae_precision` says.

With `model.vae_tile` it works on tiles, which take the memory of a tile. A tile overlaps the one above it and the one
to its left by a quarter. There the first fades into the second, as in diffusers. Only what looks beyond a tile (group
norms, attention in the middle) differs from the whole image's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.data.buckets import Size
from flame_train.engine import Tensor, set_float32_matmul_precision, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, float32
from flame_train.engine.mode import Float32Precision
from flame_train.networks.files.part import Part
from flame_train.networks.fixed_batch import FixedBatches, HostArrays, Layout
from flame_train.networks.vae.vae import Vae, VaeArch, scaled_latents


class VaeTiles:
    """Encodes and decodes as a `Vae` does, by tiles of `side` pixels, a multiple of four latent pixels; 0: whole."""

    def __init__(self, vae: Vae, side: int) -> None:
        self.vae, self.side = vae, side
        # one entry a shape, for as long as the VAE lives: a captured call cannot bring them from the host
        self._shares: dict[tuple[int, int, DType, str], Tensor] = {}

    def encode_moments(self, pixels_BHWC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log variance; see `Vae.encode_moments`."""

        def encoded(tile_BHWC: Tensor) -> Tensor:
            return F.cat(list(self.vae.encode_moments(tile_BHWC)), dim=-1)

        if self._whole(pixels_BHWC, self.side):
            return self.vae.encode_moments(pixels_BHWC)
        mean, logvar = F.chunk(self._tiled(pixels_BHWC, encoded, self.side, self._latent_side), 2, dim=-1)
        return mean, logvar

    def decode(self, latents_BHWZ: Tensor) -> Tensor:
        """Returns RGB pixels; see `Vae.decode`."""
        if self._whole(latents_BHWZ, self._latent_side):
            return self.vae.decode(latents_BHWZ)
        return self._tiled(latents_BHWZ, self.vae.decode, self._latent_side, self.side)

    @property
    def _latent_side(self) -> int:
        return self.side // self.vae.arch.downscale

    def _whole(self, x_BHWC: Tensor, side: int) -> bool:
        return not self.side or max(x_BHWC.shape[-3:-1]) <= side

    def _tiled(self, x_BHWC: Tensor, made: Callable[[Tensor], Tensor], side: int, made_side: int) -> Tensor:
        """Returns `made` of every tile of `side` pixels, whose results have `made_side`, as one image."""
        H, W = x_BHWC.shape[-3:-1]
        step, made_step = side * 3 // 4, made_side * 3 // 4
        rows: list[Tensor] = []
        above: list[Tensor] = []
        for top in range(0, H, step):
            row: list[Tensor] = []
            for left in range(0, W, step):
                tile = made(x_BHWC[..., top : top + side, left : left + side, :])
                if above:
                    tile = self._faded(above[len(row)], tile, -3, made_side - made_step)
                if row:
                    tile = self._faded(row[-1], tile, -2, made_side - made_step)
                row.append(tile)
            rows.append(F.cat([tile[..., :made_step, :made_step, :] for tile in row], dim=-2))
            above = row
        return F.cat(rows, dim=-3)

    def _faded(self, first: Tensor, second: Tensor, axis: int, overlap: int) -> Tensor:
        """Returns `second`, with the end of `first` along `axis` fading into its beginning."""
        length = second.shape[axis]
        both = min(first.shape[axis], length, overlap)
        share = self._share(axis, both, second)
        end, begin = F.narrow(first, axis, first.shape[axis] - both, both), F.narrow(second, axis, 0, both)
        mixed = end * (1.0 - share) + begin * share
        return F.cat([mixed, F.narrow(second, axis, both, length - both)], dim=axis) if length > both else mixed

    def _share(self, axis: int, both: int, like: Tensor) -> Tensor:
        """Returns the second tile's share of each of `both` pixels along `axis`."""
        key = axis, both, like.dtype, like.device
        if key not in self._shares:
            shape = [1] * like.ndim
            shape[axis] = both
            self._shares[key] = tensor(np.arange(both).reshape(shape) / both, like.dtype, like.device)
        return self._shares[key]


@dataclass(frozen=True, slots=True, eq=False)
class Autoencoder:
    """A model's VAE, and the scale in which its denoiser sees latents."""

    part: Part
    published: VaeArch

    @property
    def network(self) -> Vae:
        """The VAE with its weights declared, none loaded."""
        assert isinstance(self.part.network, Vae)
        return self.part.network

    @property
    def downscale(self) -> int:
        """The side, in pixels, of the square of which one latent pixel is made."""
        return self.network.arch.downscale

    @property
    def frame_stride(self) -> int:
        """How many frames one of latents stands for after the first, which stands for one; 0: there is no time."""
        return self.network.arch.frame_stride

    def latent_shape(self, size: Size, frames: int = 1) -> tuple[int, ...]:
        """Returns (h, w, Z) of an image (H, W), or (f, h, w, Z) of so many frames where there is time."""
        return self.network.arch.latent_shape((*self.frames_axis(frames), *size))

    def frames_problem(self, frames: int) -> str:
        """Says why no clip of the model has so many frames; empty if one does."""
        stride = self.frame_stride
        if not stride:
            return f"expected 1 for a model of images, got {frames}" if frames > 1 else ""
        more = (frames - 1) % stride
        below = frames - more
        return f"expected 1 and a multiple of {stride}, such as {below} or {below + stride}, got {frames}" * bool(more)

    def frames_axis(self, frames: int = 1) -> tuple[int, ...]:
        """Returns the axes before height and width of pixels: of so many frames where there is time, else none."""
        return (frames,) if self.frame_stride else ()

    def seen(self, mean: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the mean of latents in the denoiser's scale, fp32: an image without noise."""
        pixels: np.ndarray[Any, Any] = scaled_latents(self.published, mean)
        return pixels

    def load(self, precision: str, device: str, tile: int = 0) -> LoadedVae:
        """Returns the VAE with its weights. `precision` is `model.vae_precision`, `tile` is `model.vae_tile`."""
        tf32 = precision == "tf32"
        network: Vae = self.part.load(device=device, dtype="fp32" if tf32 else precision)
        return LoadedVae(network, device, "high" if tf32 else "highest", tile)


@dataclass(frozen=True, slots=True)
class LoadedVae:
    """Images to latent moments, latents to images; fp32 as exact as `precision` says, by tiles of `tile` pixels."""

    network: Vae
    device: str
    precision: Float32Precision = "highest"
    tile: int = 0

    def inputs(self, pixels: np.ndarray[Any, Any]) -> HostArrays:
        """Returns what `encoder` takes of uint8 RGB pixels (H, W, 3), or (F, H, W, 3) of a clip: scaled to [-1, 1].

        Where there is time an image has one frame.
        """
        scaled = (np.arange(256, dtype=np.float32) / 127.5 - 1.0).astype(self.network.dtype)
        alone = self.network.arch.frame_stride and pixels.ndim == 3
        return {"pixels": scaled[pixels[None] if alone else pixels]}

    def encoder(self) -> FixedBatches:
        """Makes `mean` and `logvar` (h, w, Z), fp32, of images, or (f, h, w, Z) of clips, one at a time.

        In bf16 some of cuDNN's convolutions round an image otherwise at another place of a batch.
        """
        arch, tiles = self.network.arch, VaeTiles(self.network, self.tile)

        def moments(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with set_float32_matmul_precision(self.precision):
                mean, logvar = tiles.encode_moments(given["pixels"])
            return {"mean": mean.float(), "logvar": logvar.float()}

        def results(item: HostArrays) -> Layout:
            return dict.fromkeys(("mean", "logvar"), (arch.latent_shape(item["pixels"].shape[:-1]), float32))

        return FixedBatches(moments, results, lambda item: 1, self.device)

    def decode(self, latents: Tensor) -> np.ndarray[Any, Any]:
        """Returns uint8 RGB pixels (B, H, W, 3) of latents (B, h, w, Z) as the denoiser sees them.

        Both have frames behind B where there is time.
        """
        with set_float32_matmul_precision(self.precision):
            pixels = VaeTiles(self.network, self.tile).decode(latents.to(self.network.dtype)).float().numpy()
        return np.rint((np.clip(pixels, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
