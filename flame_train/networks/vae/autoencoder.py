"""The autoencoder of a model: images to latents, and back, in fp32 or as `model.vae_precision` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.data.buckets import Size
from flame_train.engine import Tensor, set_float32_matmul_precision
from flame_train.engine.dtype import float32
from flame_train.engine.mode import Float32Precision
from flame_train.networks.files.part import Part
from flame_train.networks.fixed_batch import FixedBatches, HostArrays, Layout
from flame_train.networks.vae.tiles import VaeTiles
from flame_train.networks.vae.vae import Vae, VaeArch, scaled_latents


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

    def latent_shape(self, size: Size) -> tuple[int, int, int]:
        """(h, w, Z) of an image (H, W)."""
        return size[0] // self.downscale, size[1] // self.downscale, self.network.arch.seen_channels

    def seen(self, mean: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The mean of latents in the denoiser's scale, fp32: an image without noise."""
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
        """Returns what `encoder` takes of uint8 RGB pixels (H, W, 3): they are scaled to [-1, 1]."""
        scaled = (np.arange(256, dtype=np.float32) / 127.5 - 1.0).astype(self.network.dtype)
        return {"pixels": scaled[pixels]}

    def encoder(self) -> FixedBatches:
        """Makes `mean` and `logvar` (H / 8, W / 8, Z), fp32, of images, one at a time.

        In bf16 some of cuDNN's convolutions round an image otherwise at another place of a batch.
        """
        arch, tiles = self.network.arch, VaeTiles(self.network, self.tile)

        def moments(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with set_float32_matmul_precision(self.precision):
                mean, logvar = tiles.encode_moments(given["pixels"])
            return {"mean": mean.float(), "logvar": logvar.float()}

        def results(item: HostArrays) -> Layout:
            height, width = item["pixels"].shape[:2]
            shape = height // arch.downscale, width // arch.downscale, arch.seen_channels
            return dict.fromkeys(("mean", "logvar"), (shape, float32))

        return FixedBatches(moments, results, lambda item: 1, self.device)

    def decode(self, latents: Tensor) -> np.ndarray[Any, Any]:
        """Uint8 RGB pixels (B, H, W, 3) of latents (B, h, w, Z) as the denoiser sees them."""
        with set_float32_matmul_precision(self.precision):
            pixels = VaeTiles(self.network, self.tile).decode(latents.to(self.network.dtype)).float().numpy()
        return np.rint((np.clip(pixels, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)
