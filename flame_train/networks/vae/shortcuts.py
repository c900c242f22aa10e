"""The ways around an autoencoder's levels, which hold no weights: means on the way down, copies on the way up.

Wan 2.2's autoencoder has them (arXiv 2503.20314; the idea is that of arXiv 2410.10733), and Qwen-Image 2.1's. Both were
made for films, whose levels may join frames as well. A single image is the last frame, and those before it are zeros.
Shape letters: B batch, H height, W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from flame_train.engine import Tensor
from flame_train.engine import functional as F


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
        """(B, H side, W side, channels): copies of channels, of whose frames the last is kept."""
        B, H, W, C = x_BHWC.shape
        s, films = self.side, self.channels * self.frames * self.side**2
        copies = x_BHWC.unsqueeze(-1).expand(B, H, W, C, films // C).reshape(B, H, W, self.channels, self.frames, s, s)
        return copies[:, :, :, :, -1].permute(0, 1, 4, 2, 5, 3).reshape(B, H * s, W * s, self.channels)
