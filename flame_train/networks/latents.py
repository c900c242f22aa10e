"""Latents as a denoiser takes them: checked in its own words, and cut into the squares that are its tokens."""

from __future__ import annotations

from flame_train.engine import Tensor
from flame_train.errors import ShapeError


def check_latents(network: str, x_BHWC: Tensor, channels: int, multiple: int) -> None:
    """Raises ShapeError unless latents are (B, H, W, `channels`) with H and W multiples of `multiple`.

    Args:
        network: its name in the message, such as "UNet".
        x_BHWC: the latents.
        channels: the latents' channels.
        multiple: what both sides must be multiples of.
    """
    shape = x_BHWC.shape
    if len(shape) != 4 or shape[3] != channels:
        raise ShapeError(f"{network}: expected latents (B, H, W, {channels}), got {shape}")
    height, width = shape[1:3]
    if height % multiple or width % multiple or not height or not width:
        raise ShapeError(
            f"{network}: expected latents whose height and width are multiples of {multiple}, got {height} x {width}"
        )


def token_grid(network: str, x_BHWC: Tensor, channels: int, side: int) -> tuple[int, int, int]:
    """B, and the rows and columns of tokens, squares of `side` latent pixels. Raises ShapeError as `check_latents`."""
    check_latents(network, x_BHWC, channels, side)
    B, H, W, _ = x_BHWC.shape
    return B, H // side, W // side


def patchify(x_BHWC: Tensor, side: int, channels_first: bool) -> Tensor:
    """Squares of latents as tokens (B, L, F), each with its channels before its pixels or behind them."""
    B, h, w, C = x_BHWC.shape[0], x_BHWC.shape[1] // side, x_BHWC.shape[2] // side, x_BHWC.shape[3]
    order = (0, 1, 3, 5, 2, 4) if channels_first else (0, 1, 3, 2, 4, 5)
    return x_BHWC.reshape(B, h, side, w, side, C).permute(*order).reshape(B, h * w, -1)


def unpatchify(tokens_BLF: Tensor, grid: tuple[int, int], side: int, channels_first: bool) -> Tensor:
    """The latents (B, H, W, C) of `grid` tokens: the inverse of `patchify`."""
    (B, _, F), (h, w) = tokens_BLF.shape, grid
    C = F // side**2
    if channels_first:
        out = tokens_BLF.reshape(B, h, w, C, side, side).permute(0, 1, 4, 2, 5, 3)
    else:
        out = tokens_BLF.reshape(B, h, w, side, side, C).permute(0, 1, 3, 2, 4, 5)
    return out.reshape(B, h * side, w * side, C)
