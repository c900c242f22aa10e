"""The autoencoder on images that are cut into tiles, which takes the memory of a tile: for small cards.

A tile overlaps the one above it and the one to its left by a quarter, in which the first fades into the second. Only
what looks beyond a tile (group norms, attention in the middle) differs from the whole image's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F
from flame_train.models.common.vae import Vae


def encode_in_tiles(vae: Vae, pixels_BHWC: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """As `Vae.encode_moments`, by tiles of `side` pixels, a multiple of four latent pixels."""
    downscale = vae.arch.downscale

    def encoded(tile_BHWC: Tensor) -> Tensor:
        return F.cat(list(vae.encode_moments(tile_BHWC)), dim=-1)

    moments = _tiled(pixels_BHWC, encoded, side, side // downscale)
    mean, logvar = F.chunk(moments, 2, dim=-1)
    return mean, logvar


def decode_in_tiles(vae: Vae, latents_BHWZ: Tensor, side: int) -> Tensor:
    """As `Vae.decode`, by tiles of `side` pixels, a multiple of four latent pixels."""
    return _tiled(latents_BHWZ, vae.decode, side // vae.arch.downscale, side)


def _tiled(x_BHWC: Tensor, made: Callable[[Tensor], Tensor], side: int, made_side: int) -> Tensor:
    """`made` of every tile of `side` pixels, whose results have `made_side`, as one image."""
    H, W = x_BHWC.shape[1:3]
    if max(H, W) <= side:
        return made(x_BHWC)
    step, made_step = side * 3 // 4, made_side * 3 // 4
    rows: list[Tensor] = []
    above: list[Tensor] = []
    for top in range(0, H, step):
        row: list[Tensor] = []
        for left in range(0, W, step):
            tile = made(x_BHWC[:, top : top + side, left : left + side])
            if above:
                tile = _faded(above[len(row)], tile, 1, made_side - made_step)
            if row:
                tile = _faded(row[-1], tile, 2, made_side - made_step)
            row.append(tile)
        rows.append(F.cat([tile[:, :made_step, :made_step] for tile in row], dim=2))
        above = row
    return F.cat(rows, dim=1)


def _faded(first: Tensor, second: Tensor, axis: int, overlap: int) -> Tensor:
    """`second`, with the end of `first` along `axis` fading into its beginning."""
    length = second.shape[axis]
    both = min(first.shape[axis], length, overlap)
    shape = [1, 1, 1, 1]
    shape[axis] = both
    share = tensor(np.arange(both).reshape(shape) / both, second.dtype, second.device)
    end, begin = F.narrow(first, axis, first.shape[axis] - both, both), F.narrow(second, axis, 0, both)
    mixed = end * (1.0 - share) + begin * share
    return F.cat([mixed, F.narrow(second, axis, both, length - both)], dim=axis) if length > both else mixed
