"""What the autoencoders are made of: norms, residual blocks, attention, and the layers that halve and double an image.

Attribute names are those of the published single file. Activations are channels-last. Shape letters: B batch, H height,
W width, C channels. A film comes in chunks of F frames, of which a batch has N = B F in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.nn import param

_EPS: Final = 1e-6
_LEAST_NORM: Final = 1e-12  # to which the length of a pixel's channels is raised


class Past:
    """What each layer saw last of a film, whose chunks come one after the other.

    Attributes:
        films: how many films there are.
        first: whether the chunk at hand is the first, of one frame.
    """

    def __init__(self, films: int) -> None:
        self.films, self.first = films, True
        self._seen: dict[int, Tensor] = {}

    def behind(self, layer: nn.Module, x_NHWC: Tensor, count: int) -> Tensor:
        """Returns what the layer gets, behind the `count` frames that it got last: zeros where it got none."""
        own = x_NHWC.reshape(self.films, -1, *x_NHWC.shape[1:])
        seen = self._seen.get(id(layer))
        film = F.pad(own, (0, 0, 0, 0, 0, 0, count, 0)) if seen is None else F.cat([seen, own], dim=1)
        self._seen[id(layer)] = film[:, -count:]
        return film


class FilmConv(nn.Conv2d):
    """A convolution that sees the frames before one as well; a still has none, and the published padding is zeros.

    Args:
        in_channels, out_channels: channels of input and output.
        kernel_size, stride, padding: pixels.
        taps: how many frames it sees. Their kernels stand in a row, that of the frame itself last.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, taps: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding)
        self.taps = taps
        self.weight = param(taps * out_channels, in_channels, *self.kernel_size)

    def forward(self, x_NHWC: Tensor, past: Past | None = None) -> Tensor:
        if past is None or self.taps == 1:
            return self._tap(x_NHWC, self.taps - 1)
        film_BFHWC = past.behind(self, x_NHWC, self.taps - 1)
        return self._tap(x_NHWC, self.taps - 1) if past.first else self.over_time(film_BFHWC)

    def over_time(self, film_BFHWC: Tensor, step: int = 1) -> Tensor:
        """Returns (N, H, W, C) for every `step`-th run of `taps` frames."""
        runs = (film_BFHWC.shape[1] - self.taps) // step + 1
        made = None
        for tap in range(self.taps):
            frames = film_BFHWC[:, tap : tap + step * (runs - 1) + 1 : step]
            found = self._tap(frames.reshape(-1, *frames.shape[2:]), tap)
            made = found if made is None else made + found
        assert made is not None
        return made

    def _tap(self, x_NHWC: Tensor, tap: int) -> Tensor:
        """Returns what the frames add that are seen by one of the kernels; the last has the bias."""
        kernels, own = nn.compute_copy(self.weight), self.out_channels
        bias = nn.compute_copy(self.bias) if tap == self.taps - 1 else None
        kernel = kernels if self.taps == 1 else kernels[tap * own : (tap + 1) * own]
        return F.conv2d(x_NHWC, kernel, bias, self.stride, self.padding, layout="NHWC")


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

    def __init__(self, in_channels: int, out_channels: int, groups: int, taps: int = 1) -> None:
        self.norm1 = norm(groups, in_channels)
        self.conv1 = FilmConv(in_channels, out_channels, 3, taps, padding=1)
        self.norm2 = norm(groups, out_channels)
        self.conv2 = FilmConv(out_channels, out_channels, 3, taps, padding=1)
        self.has_shortcut = in_channels != out_channels
        if self.has_shortcut:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        h_BHWC = self.conv1(self.norm1(x_BHWC), past)
        h_BHWC = self.conv2(self.norm2(h_BHWC), past)
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

    def __init__(self, channels: int, groups: int, taps: int = 1) -> None:
        self.block_1 = ResnetBlock(channels, channels, groups, taps)
        self.attn_1 = AttnBlock(channels, groups)
        self.block_2 = ResnetBlock(channels, channels, groups, taps)

    def forward(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x_BHWC, past)), past)


class Downsample(nn.Module):
    """Half the resolution; the zeros are put to the right of and below the image only.

    With `taps` it also joins two frames of a film into one. The first frame stays alone.
    """

    def __init__(self, channels: int, taps: int = 0) -> None:
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)
        self.joins = taps > 1
        if self.joins:
            self.time_conv = FilmConv(channels, channels, 1, taps)

    def forward(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        h_BHWC = self.conv(F.pad(x_BHWC, (0, 0, 0, 1, 0, 1)))
        if past is None or not self.joins:
            return h_BHWC
        film_BFHWC = past.behind(self, h_BHWC, 1)
        return h_BHWC if past.first else self.time_conv.over_time(film_BFHWC, 2)


class Upsample(nn.Module):
    """Twice the resolution: each pixel repeated, then a convolution.

    With `taps` it first makes two frames of each frame of a film but the first.
    """

    def __init__(self, channels: int, out_channels: int, taps: int = 0) -> None:
        self.conv = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.parts = taps > 1
        if self.parts:
            self.time_conv = FilmConv(channels, 2 * channels, 1, taps)

    def forward(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        if past is not None and self.parts and not past.first:
            N, H, W, C = x_BHWC.shape
            pairs = self.time_conv(x_BHWC, past).reshape(N, H, W, 2, C)
            x_BHWC = pairs.permute(0, 3, 1, 2, 4).reshape(2 * N, H, W, C)
        return self.conv(F.upsample_nearest(x_BHWC, 2, layout="NHWC"))


@dataclass(frozen=True, slots=True)
class Shortcut:
    """Pixels of `channels` channels beside a level that resamples by `side` along each side and `frames` in time."""

    channels: int
    side: int
    frames: int

    def down(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        """(B, H / side, W / side, channels): the means of neighbours among a square's frames, pixels and channels.

        Before a film's first frame there are zeros, as before a still.
        """
        B, H, W, C = x_BHWC.shape
        h, w, square = H // self.side, W // self.side, self.side**2
        squares = x_BHWC.reshape(B, h, self.side, w, self.side, C).permute(0, 1, 3, 5, 2, 4).reshape(B, h, w, C, square)
        if past is None or past.first or self.frames == 1:
            films = F.pad(squares, (square * (self.frames - 1), 0))
        else:
            runs = squares.reshape(B // self.frames, self.frames, h, w, C, square)
            films = runs.permute(0, 2, 3, 4, 1, 5)
        return films.reshape(films.shape[0], h, w, self.channels, -1).mean(dim=-1)

    def up(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        """Returns (B, H side, W side, channels): copies of channels. Of a first frame's frames the last is kept."""
        B, H, W, C = x_BHWC.shape
        s, films = self.side, self.channels * self.frames * self.side**2
        copies = x_BHWC.unsqueeze(-1).expand(B, H, W, C, films // C).reshape(B, H, W, self.channels, self.frames, s, s)
        if past is None or past.first:
            return copies[:, :, :, :, -1].permute(0, 1, 4, 2, 5, 3).reshape(B, H * s, W * s, self.channels)
        return copies.permute(0, 4, 1, 5, 2, 6, 3).reshape(B * self.frames, H * s, W * s, self.channels)


Around = Callable[[Tensor, Past | None], Tensor]
"""What leads around a level: its input, and what came before in a film, to what is added to its output."""


class Level(nn.Module):
    """One resolution: residual blocks, then the resampling to the next, if there is a next."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        blocks: int,
        groups: int,
        down: bool = False,
        up: int = 0,
        around: Around | None = None,
        taps: int = 1,
        frames: int = 1,
    ) -> None:
        """Declares the layers.

        Args:
            in_channels: channels of the input.
            channels: channels of the output.
            blocks: number of residual blocks.
            groups: groups of the norms, see `VaeArch.groups`.
            down: whether the stage ends by halving height and width.
            up: the channels after a doubling of height and width at its end; 0: there is none.
            around: what is added of the input, where a shortcut leads around the level.
            taps: frames that a convolution sees.
            frames: how many frames of a film the resampling joins, or makes of one.
        """
        self.block = nn.ModuleList(
            [ResnetBlock(in_channels if i == 0 else channels, channels, groups, taps) for i in range(blocks)]
        )
        over_time = taps if frames > 1 else 1
        self.has_down, self.has_up, self.around = down, up > 0, around
        if down:
            self.downsample = Downsample(channels, over_time)
        if up:
            self.upsample = Upsample(channels, up, over_time)

    def forward(self, x_BHWC: Tensor, past: Past | None = None) -> Tensor:
        h_BHWC = x_BHWC
        for block in self.block:
            h_BHWC = block(h_BHWC, past)
        if self.has_down:
            h_BHWC = self.downsample(h_BHWC, past)
        if self.has_up:
            h_BHWC = self.upsample(h_BHWC, past)
        return h_BHWC if self.around is None else h_BHWC + self.around(x_BHWC, past)
