"""What the autoencoders are made of: norms, residual blocks, attention, and the layers that halve and double an image.

Attribute names are those of the published single file. Activations are channels-last. Shape letters: B batch, H height,
W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F

_EPS: Final = 1e-6
_LEAST_NORM: Final = 1e-12  # to which the length of a pixel's channels is raised


class RmsNormSilu(nn.RMSNorm):
    """silu(RMS norm)."""

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return F.silu(super().forward(x_BHWC))


def norm(groups: int, channels: int, silu: bool = True) -> nn.Module:
    """Returns the norm of an autoencoder with so many groups (see `VaeArch.groups`), with silu behind it if asked."""
    if groups:
        return nn.GroupNorm(groups, channels, _EPS, silu=silu)
    eps = _LEAST_NORM**2 / channels
    return RmsNormSilu(channels, eps) if silu else nn.RMSNorm(channels, eps)


class ResnetBlock(nn.Module):
    """Two convolutions around a residual."""

    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        self.norm1 = norm(groups, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = norm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.has_shortcut = in_channels != out_channels
        if self.has_shortcut:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        h_BHWC = self.conv1(self.norm1(x_BHWC))
        h_BHWC = self.conv2(self.norm2(h_BHWC))
        return (self.nin_shortcut(x_BHWC) if self.has_shortcut else x_BHWC) + h_BHWC


class AttnBlock(nn.Module):
    """Self attention over all positions with one head; its projections are 1x1 convolutions."""

    def __init__(self, channels: int, groups: int) -> None:
        self.norm = norm(groups, channels, silu=False)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x_BHWC: Tensor) -> Tensor:
        B, H, W, C = x_BHWC.shape
        h_BHWC = self.norm(x_BHWC)
        q, k, v = (part(h_BHWC).reshape(B, 1, H * W, C) for part in (self.q, self.k, self.v))
        o_BHWC = F.scaled_dot_product_attention(q, k, v).reshape(B, H, W, C)
        return x_BHWC + self.proj_out(o_BHWC)


class Middle(nn.Module):
    """The lowest resolution: attention between two residual blocks."""

    def __init__(self, channels: int, groups: int) -> None:
        self.block_1 = ResnetBlock(channels, channels, groups)
        self.attn_1 = AttnBlock(channels, groups)
        self.block_2 = ResnetBlock(channels, channels, groups)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x_BHWC)))


class Downsample(nn.Module):
    """Half the resolution; the zeros are put to the right of and below the image only."""

    def __init__(self, channels: int) -> None:
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return self.conv(F.pad(x_BHWC, (0, 0, 0, 1, 0, 1)))


class Upsample(nn.Module):
    """Twice the resolution: each pixel repeated, then a convolution."""

    def __init__(self, channels: int, out_channels: int) -> None:
        self.conv = nn.Conv2d(channels, out_channels, 3, padding=1)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return self.conv(F.upsample_nearest(x_BHWC, 2, layout="NHWC"))


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Pixels of `channels` channels beside a level that resamples by `side` along each side and `frames` in time."""

    channels: int
    side: int
    frames: int

    def down(self, x_BHWC: Tensor) -> Tensor:
        """(B, H / side, W / side, channels): the means of neighbours among a square's frames, pixels and channels."""
        B, H, W, C = x_BHWC.shape
        h, w, square = H // self.side, W // self.side, self.side**2
        squares = x_BHWC.reshape(B, h, self.side, w, self.side, C).permute(0, 1, 3, 5, 2, 4).reshape(B, h, w, C, square)
        films = F.pad(squares, (square * (self.frames - 1), 0))
        return films.reshape(B, h, w, self.channels, -1).mean(dim=-1)

    def up(self, x_BHWC: Tensor) -> Tensor:
        """Returns (B, H side, W side, channels): copies of channels, of whose frames the last is kept."""
        B, H, W, C = x_BHWC.shape
        s, films = self.side, self.channels * self.frames * self.side**2
        copies = x_BHWC.unsqueeze(-1).expand(B, H, W, C, films // C).reshape(B, H, W, self.channels, self.frames, s, s)
        return copies[:, :, :, :, -1].permute(0, 1, 4, 2, 5, 3).reshape(B, H * s, W * s, self.channels)
