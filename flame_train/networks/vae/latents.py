"""Latents between the autoencoder and the diffusion model: normalised channel by channel, and in squares.

Shape letters: B batch, H height, W width, C channels.
"""

from __future__ import annotations

from typing import Final

from flame_train.engine import Tensor, nn
from flame_train.engine.nn import param
from flame_train.errors import ModelFileError
from flame_train.networks.files.stated import Stated

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
        """Mean and standard deviation."""
        return self.running_mean, (self.running_var + STATISTICS_EPS).sqrt()


def patched(x_BHWC: Tensor, side: int) -> Tensor:
    """Squares of pixels as one: (B, H / side, W / side, C * side^2), the numbers of a channel in a row."""
    if side == 1:
        return x_BHWC
    B, H, W, C = x_BHWC.shape
    squares = x_BHWC.reshape(B, H // side, side, W // side, side, C).permute(0, 1, 3, 5, 2, 4)
    return squares.reshape(B, H // side, W // side, C * side**2)


def unpatched(x_BHWC: Tensor, side: int) -> Tensor:
    """The reverse of `patched`."""
    if side == 1:
        return x_BHWC
    B, H, W, C = x_BHWC.shape
    squares = x_BHWC.reshape(B, H, W, C // side**2, side, side).permute(0, 1, 4, 2, 5, 3)
    return squares.reshape(B, H * side, W * side, C // side**2)


def statistic(stated: Stated, key: str, usual: tuple[float, ...]) -> tuple[float, ...]:
    """A number of each channel of latents, as a folder states it. Raises ModelFileError for another list than that."""
    found = stated.values.get(key, list(usual))
    if not isinstance(found, list) or len(found) != len(usual) or not all(isinstance(x, int | float) for x in found):
        raise ModelFileError(f"{stated.path}: {key}: expected {len(usual)} numbers, got {found!r}; mend the file")
    return tuple(float(x) for x in found)
