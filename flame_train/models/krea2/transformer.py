"""Krea 2's denoiser: one stream of text and image, with one modulation for all blocks and a table for each.

Attribute names are those of the published single file. Activations are channels-last. Shape letters: B batch, H height
and W width in latent pixels, C channels of the latents, D model width, E width of a head. There are L image tokens and
T text tokens, S = T + L in all.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, compute_dtype
from flame_train.engine.nn import param
from flame_train.models.common.blocks import Block, BlockNetwork, linears_in
from flame_train.models.common.latents import patchify, token_grid, unpatchify
from flame_train.models.common.rope import grid, rope_angles
from flame_train.models.krea2.arch import PATCH, Krea2Arch
from flame_train.models.krea2.parts import Attention, FeedForward, ZeroCentredNorm
from flame_train.models.krea2.text import TextFusion

_PARTS: Final = 6  # scale, shift and gate, of the attention and of the gated network


class Table(nn.Module):
    """What a block adds to the modulation that all share."""

    lin: Tensor

    def __init__(self, *shape: int) -> None:
        self.lin = param(*shape, init="zeros")


def _gelu(x: Tensor) -> Tensor:
    found: Tensor = F.gelu(x, approximate="tanh")
    return found


class SingleStreamBlock(Block):
    """Attention and the gated network, each with a scale and a shift behind its norm, and a gate."""

    def __init__(self, arch: Krea2Arch) -> None:
        self.mod = Table(_PARTS * arch.width)
        self.prenorm, self.postnorm = (ZeroCentredNorm(arch.width, arch.eps) for _ in range(2))
        self.attn = Attention(arch.width, arch.heads, arch.kv_heads, arch.eps)
        self.mlp = FeedForward(arch.width, arch.hidden)

    def forward(self, x_BSD: Tensor, cos_S1E: Tensor, sin_S1E: Tensor, seen_B: Tensor, shared_B1M: Tensor) -> Tensor:
        """The tokens after the block.

        Args:
            x_BSD: the text's tokens and the image's (B, S, D).
            cos_S1E, sin_S1E: their rotary angles, (S, 1, E).
            seen_B: how many are looked at, from the first on, int32 (B,).
            shared_B1M: the modulation that all blocks share, (B, 1, 6 D).

        Returns:
            Tokens of the same shape.
        """
        scale, shift, gate, *feed = F.chunk(shared_B1M + nn.compute_copy(self.mod.lin), _PARTS, dim=-1)
        found = self.attn(self.prenorm.modulated(x_BSD, scale, shift), seen_B, (cos_S1E, sin_S1E))
        x_BSD = F.gated_add(x_BSD, gate, found)
        if self.checkpointing == "mlp":
            return checkpoint(self._fed, x_BSD, *feed)
        return self._fed(x_BSD, *feed)

    def _fed(self, x_BSD: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Tensor:
        found: Tensor = F.gated_add(x_BSD, gate, self.mlp(self.postnorm.modulated(x_BSD, scale, shift)))
        return found


class LastLayer(nn.Module):
    """A scale and a shift that follow from the time, and the way back to a token's features."""

    def __init__(self, arch: Krea2Arch) -> None:
        self.linear = nn.Linear(arch.width, PATCH**2 * arch.channels)
        self.norm = ZeroCentredNorm(arch.width, arch.eps)
        self.modulation = Table(2, arch.width)

    def forward(self, x_BLD: Tensor, time_B1D: Tensor) -> Tensor:
        scale, shift = F.chunk(time_B1D + nn.compute_copy(self.modulation.lin), 2, dim=1)
        return self.linear(self.norm.modulated(x_BLD, scale, shift))


class Krea2(BlockNetwork):
    """Predicts the velocity of the flow in noised latents."""

    def __init__(self, arch: Krea2Arch) -> None:
        self.arch = arch
        # one entry a shape, for as long as the model lives: captured steps read them at their addresses
        self._tables: dict[tuple[int, int, int, DType, str], tuple[Tensor, Tensor]] = {}
        width, text = arch.width, arch.text_dim
        self.first = nn.Linear(PATCH**2 * arch.channels, width)
        self.tmlp = nn.ModuleList([nn.Linear(arch.frequencies, width), None, nn.Linear(width, width)])
        self.tproj = nn.ModuleList([None, nn.Linear(width, _PARTS * width)])
        self.txtfusion = TextFusion(arch)
        ends = nn.Linear(text, width), None, nn.Linear(width, width)
        self.txtmlp = nn.ModuleList([ZeroCentredNorm(text, arch.eps), *ends])
        self.blocks = nn.ModuleList([SingleStreamBlock(arch) for _ in range(arch.depth)])
        self.last = LastLayer(arch)

    def forward(self, x_BHWC: Tensor, times_B: Tensor, states_BTF: Tensor, rows_B: Tensor) -> Tensor:
        """The velocity for noised latents, which like the states have the dtype of the weights.

        Args:
            x_BHWC: latents (B, H, W, C), H and W even.
            times_B: noise levels (B,), fp32.
            states_BTF: a text's states after N layers, side by side, (B, T, N text_dim).
            rows_B: how many of them, from the first on, are tokens, (B,) int32; behind them is padding.

        Returns:
            The velocity (B, H, W, C).

        Raises:
            ShapeError: latents of other sizes.
        """
        arch = self.arch
        B, h, w = token_grid("Krea 2's transformer", x_BHWC, arch.channels, PATCH)
        T = states_BTF.shape[1]
        cos_S1E, sin_S1E = self._table(T, h, w)
        time_B1D = self._time(times_B, x_BHWC.dtype)
        states_BTNC = states_BTF.reshape(B, T, arch.text_layers, arch.text_dim)
        text_BTD = self._text(self.txtfusion(states_BTNC, rows_B))
        tokens = patchify(x_BHWC, PATCH, channels_first=True)
        x_BSD = F.cat([self.first(tokens), text_BTD], dim=1)  # padding comes last, where attention leaves it out
        seen_B, shared_B1M = rows_B + h * w, self.tproj[1](_gelu(time_B1D))
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_S1E, sin_S1E, seen_B, shared_B1M)
        return unpatchify(self.last(x_BSD[:, : h * w], time_B1D), (h, w), PATCH, channels_first=True)

    def quantizable(self) -> dict[nn.Linear, bool]:
        """The linear layers of all blocks, those over the text included."""
        return linears_in([*self.txtfusion.layerwise_blocks, *self.txtfusion.refiner_blocks, *self.blocks])

    def _time(self, times_B: Tensor, dtype: DType) -> Tensor:
        """The vector (B, 1, D) of a time's sinusoid."""
        sinusoid = F.timestep_embedding(times_B * 1000.0, self.arch.frequencies, dtype=dtype).unsqueeze(1)
        found: Tensor = self.tmlp[2](_gelu(self.tmlp[0](sinusoid)))
        return found

    def _text(self, x_BTC: Tensor) -> Tensor:
        """The text's tokens in the model's width, (B, T, D)."""
        norm, first, _, second = self.txtmlp
        found: Tensor = second(_gelu(first(norm(x_BTC))))
        return found

    def _table(self, text: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine (S, 1, E) of the angles of the image's tokens and the text's, in fp32 at least."""
        like = nn.compute_copy(self.first.weight)
        assert isinstance(like, Tensor)
        key = text, rows, columns, like.dtype, like.device
        if key not in self._tables:
            places = np.concatenate([grid(rows, columns), np.zeros((text, 3))])  # a text's tokens are at the origin
            angles = rope_angles(places, self.arch.axes, self.arch.theta)[:, None]
            cos, sin = (tensor(turn(angles), compute_dtype(like.dtype), like.device) for turn in (np.cos, np.sin))
            self._tables[key] = cos, sin
        return self._tables[key]
