"""Latents between the autoencoder and the denoiser: normalised channel by channel, checked, and cut into squares.

Shape letters: B batch, H height, W width, C channels, L tokens, F numbers of a token.
"""

from __future__ import annotations

from typing import Final

from flame_train.engine import Tensor, nn
from flame_train.engine.nn import param
from flame_train.errors import ModelFileError, ShapeError
from flame_train.networks.files.stated import Stated


def check_latents(network: str, x_BHWC: Tensor, channels: int, multiple: int) -> None:
    """Raises ShapeError unless latents are (B, H, W, `channels`) with H and W multiples of `multiple`.

    Args:
        network: its name in the message, such as "UNet".
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
    """Returns the latents (B, H, W, C) of `grid` tokens: the inverse of `patchify`."""
    (B, _, F), (h, w) = tokens_BLF.shape, grid
    C = F // side**2
    if channels_first:
        out = tokens_BLF.reshape(B, h, w, C, side, side).permute(0, 1, 4, 2, 5, 3)
    else:
        out = tokens_BLF.reshape(B, h, w, side, side, C).permute(0, 1, 3, 2, 4, 5)
    return out.reshape(B, h * side, w * side, C)


STATISTICS_EPS: Final = 1e-4
"""Is added to the stored variances of latents."""
# of Qwen-Image's latents and Wan 2.1's, channel by channel, as their config.json states them
QWEN_MEAN: Final = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
QWEN_STD: Final = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


class Statistics(nn.Module):
    """The mean and the variance of each channel of patched latents, as a batch norm stores them."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        self.running_mean, self.running_var = param(channels, init="zeros"), param(channels, init="ones")

    def scale(self) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation."""
        return self.running_mean, (self.running_var + STATISTICS_EPS).sqrt()


def patched(x_BHWC: Tensor, side: int, by_column: bool = False) -> Tensor:
    """Squares of pixels as one: (B, H / side, W / side, C * side^2), the numbers of a channel in a row.

    These are a square's rows one after the other, or its columns.
    """
    if side == 1:
        return x_BHWC
    B, H, W, C = x_BHWC.shape
    order = (0, 1, 3, 5, 4, 2) if by_column else (0, 1, 3, 5, 2, 4)
    squares = x_BHWC.reshape(B, H // side, side, W // side, side, C).permute(*order)
    return squares.reshape(B, H // side, W // side, C * side**2)


def unpatched(x_BHWC: Tensor, side: int, by_column: bool = False) -> Tensor:
    """Returns the reverse of `patched`."""
    if side == 1:
        return x_BHWC
    B, H, W, C = x_BHWC.shape
    order = (0, 1, 5, 2, 4, 3) if by_column else (0, 1, 4, 2, 5, 3)
    squares = x_BHWC.reshape(B, H, W, C // side**2, side, side).permute(*order)
    return squares.reshape(B, H * side, W * side, C // side**2)


def statistic(stated: Stated, key: str, usual: tuple[float, ...]) -> tuple[float, ...]:
    """Returns a number of each channel of latents, as a folder states it. ModelFileError for another list."""
    numbers = stated.values.get(key, list(usual))
    if (
        not isinstance(numbers, list)
        or len(numbers) != len(usual)
        or not all(isinstance(x, int | float) for x in numbers)
    ):
        raise ModelFileError(f"{stated.path}: {key}: expected {len(usual)} numbers, got {numbers!r}; mend the file")
    return tuple(float(x) for x in numbers)
