"""The autoencoder on images that are cut into tiles, which takes the memory of a tile: for small cards.

A tile overlaps the one above it and the one to its left by a quarter. There the first fades into the second, as in
diffusers. Only what looks beyond a tile (group norms, attention in the middle) differs from the whole image's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType
from flame_train.networks.vae.vae import Vae


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
        """RGB pixels; see `Vae.decode`."""
        if self._whole(latents_BHWZ, self._latent_side):
            return self.vae.decode(latents_BHWZ)
        return self._tiled(latents_BHWZ, self.vae.decode, self._latent_side, self.side)

    @property
    def _latent_side(self) -> int:
        return self.side // self.vae.arch.downscale

    def _whole(self, x_BHWC: Tensor, side: int) -> bool:
        return not self.side or max(x_BHWC.shape[1:3]) <= side

    def _tiled(self, x_BHWC: Tensor, made: Callable[[Tensor], Tensor], side: int, made_side: int) -> Tensor:
        """`made` of every tile of `side` pixels, whose results have `made_side`, as one image."""
        H, W = x_BHWC.shape[1:3]
        step, made_step = side * 3 // 4, made_side * 3 // 4
        rows: list[Tensor] = []
        above: list[Tensor] = []
        for top in range(0, H, step):
            row: list[Tensor] = []
            for left in range(0, W, step):
                tile = made(x_BHWC[:, top : top + side, left : left + side])
                if above:
                    tile = self._faded(above[len(row)], tile, 1, made_side - made_step)
                if row:
                    tile = self._faded(row[-1], tile, 2, made_side - made_step)
                row.append(tile)
            rows.append(F.cat([tile[:, :made_step, :made_step] for tile in row], dim=2))
            above = row
        return F.cat(rows, dim=1)

    def _faded(self, first: Tensor, second: Tensor, axis: int, overlap: int) -> Tensor:
        """`second`, with the end of `first` along `axis` fading into its beginning."""
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
            shape = [1, 1, 1, 1]
            shape[axis] = both
            self._shares[key] = tensor(np.arange(both).reshape(shape) / both, like.dtype, like.device)
        return self._shares[key]
