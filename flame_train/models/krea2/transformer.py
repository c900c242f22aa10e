"""Krea 2's denoiser: one stream of text and image, with one modulation for all blocks and a table for each.

Control images are as in ai-toolkit and ComfyUI, for LoRAs that are trained with them: modulated as at time 0, and seen
by all tokens. Attribute names are those of the published single file. Activations are channels-last. Shape letters: B
batch, H height and W width in latent pixels, C channels of the latents, D model width, E width of a head. There are M
tokens of control images, L of the image and T of the text, in this order, S in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, compute_dtype
from flame_train.engine.nn import param
from flame_train.models.krea2.arch import PATCH, Krea2Arch
from flame_train.models.krea2.parts import Attention, FeedForward, TextFusion, ZeroCentredNorm
from flame_train.networks.block_network import Block, BlockNetwork, Rounded
from flame_train.networks.latents import patchify, token_grid, unpatchify
from flame_train.networks.rope import grid, rope_angles

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""
_PARTS: Final = 6  # scale, shift and gate, of the attention and of the gated network


class Table(nn.Module):
    """What a block adds to the modulation that all share."""

    lin: Tensor

    def __init__(self, *shape: int) -> None:
        self.lin = param(*shape, init="zeros")


def _gelu(x: Tensor) -> Tensor:
    out: Tensor = F.gelu(x, approximate="tanh")
    return out


@dataclass(frozen=True, slots=True)
class Modulation:
    """What all blocks share: the scales, shifts and gates (B, 1, 6 D) at the image's time.

    `clean` are those at time 0, of the first `count` tokens; None where there are no control images.
    """

    shared: Tensor
    clean: Tensor | None = None
    count: int = 0

    def of_block(self, table: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns six parts (B, 1, D) at the image's time, and as many at time 0, if any, with what a block adds."""
        parts = [[*F.chunk(x + table, _PARTS, dim=-1)] for x in (self.shared, self.clean) if x is not None]
        return parts[0], parts[1] if len(parts) > 1 else []


class SingleStreamBlock(Block):
    """Attention and the gated network, each with a scale and a shift behind its norm, and a gate."""

    def __init__(self, arch: Krea2Arch) -> None:
        self.mod = Table(_PARTS * arch.width)
        self.prenorm, self.postnorm = (ZeroCentredNorm(arch.width, arch.eps) for _ in range(2))
        self.attn = Attention(arch.width, arch.heads, arch.kv_heads, arch.eps)
        self.mlp = FeedForward(arch.width, arch.hidden)

    def forward(
        self, x_BSD: Tensor, cos_S1E: Tensor, sin_S1E: Tensor, seen_B: Tensor, modulation: Modulation
    ) -> Tensor:
        """Returns the tokens after the block.

        Args:
            modulation: what all blocks share.
        """
        own, clean = modulation.of_block(nn.compute_copy(self.mod.lin))
        normed = _modulated(self.prenorm, x_BSD, own[:2], clean[:2], modulation.count)
        attended = self.attn(normed, seen_B, (cos_S1E, sin_S1E))
        x_BSD = _gated_add(x_BSD, own[2], clean[2:3], attended, modulation.count)
        feed = (*own[3:], *clean[3:])
        if self.checkpointing == "mlp":
            return checkpoint(self._fed, x_BSD, modulation.count, *feed)
        return self._fed(x_BSD, modulation.count, *feed)

    def _fed(self, x_BSD: Tensor, count: int, *parts: Tensor) -> Tensor:
        own, clean = parts[:3], parts[3:]
        fed = self.mlp(_modulated(self.postnorm, x_BSD, own[:2], clean[:2], count))
        return _gated_add(x_BSD, own[2], clean[2:], fed, count)


def _modulated(norm: ZeroCentredNorm, x_BSD: Tensor, own: Sequence[Tensor], clean: Sequence[Tensor], M: int) -> Tensor:
    """Norms, scales and shifts with `own`; the first M tokens with `clean`, those at time 0."""
    return norm.modulated_apart(x_BSD, clean, own, M) if clean else norm.modulated(x_BSD, *own)


def _gated_add(x_BSD: Tensor, gate: Tensor, clean: Sequence[Tensor], found: Tensor, M: int) -> Tensor:
    """Returns x + gate * found, with another gate for the first M tokens, if there is one."""
    if not clean:
        return F.gated_add(x_BSD, gate, found)
    parts = ((x_BSD[:, :M], clean[0], found[:, :M]), (x_BSD[:, M:], gate, found[:, M:]))
    return F.cat([F.gated_add(*part) for part in parts], dim=1)


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

    # musubi-tuner rounds the blocks of the image alone, and so do files of convert_to_quant
    rounded = Rounded(("txtfusion.*_blocks.*", "blocks.*"), unless_rotated=("txtfusion.*",))

    def __init__(self, arch: Krea2Arch) -> None:
        self.arch = arch
        # one entry a shape, for as long as the model lives: captured steps read them at their addresses
        self._tables: dict[tuple[int, tuple[Grid, ...], DType, str], tuple[Tensor, Tensor]] = {}
        width, text = arch.width, arch.text_dim
        self.first = nn.Linear(PATCH**2 * arch.channels, width)
        self.tmlp = nn.ModuleList([nn.Linear(arch.frequencies, width), None, nn.Linear(width, width)])
        self.tproj = nn.ModuleList([None, nn.Linear(width, _PARTS * width)])
        self.txtfusion = TextFusion(arch)
        ends = nn.Linear(text, width), None, nn.Linear(width, width)
        self.txtmlp = nn.ModuleList([ZeroCentredNorm(text, arch.eps), *ends])
        self.blocks = nn.ModuleList([SingleStreamBlock(arch) for _ in range(arch.depth)])
        self.last = LastLayer(arch)

    def forward(
        self,
        x_BHWC: Tensor,
        times_B: Tensor,
        states_BTF: Tensor,
        rows_B: Tensor,
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents, which like the states have the dtype of the weights.

        Args:
            states_BTF: a text's states after N layers, side by side, (B, T, N text_dim).

        Raises:
            ShapeError: latents of other sizes.
        """
        arch, images = self.arch, (*controls, x_BHWC)
        grids = [token_grid("Krea 2's transformer", x, arch.channels, PATCH) for x in images]
        B, h, w = grids[-1]
        T, M, L = states_BTF.shape[1], sum(rows * columns for _, rows, columns in grids[:-1]), h * w
        cos_S1E, sin_S1E = self._table(T, tuple((rows, columns) for _, rows, columns in grids))
        time_B1D = self._time(times_B, x_BHWC.dtype)
        states_BTNC = states_BTF.reshape(B, T, arch.text_layers, arch.text_dim)
        text_BTD = self._text(self.txtfusion(states_BTNC, rows_B))
        tokens = [self.first(patchify(x, PATCH, channels_first=True)) for x in images]
        x_BSD = F.cat([*tokens, text_BTD], dim=1)  # padding comes last, where attention leaves it out
        clean = self._shared(self._time(times_B * 0.0, x_BHWC.dtype)) if controls else None
        modulation = Modulation(self._shared(time_B1D), clean, M)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_S1E, sin_S1E, rows_B + (M + L), modulation)
        return unpatchify(self.last(x_BSD[:, M : M + L], time_B1D), (h, w), PATCH, channels_first=True)

    def fusable_groups(self) -> Sequence[Sequence[nn.Linear]]:
        parts = [part for _, part in self.named_modules() if part is not self]
        return [group for part in parts for group in part.fusable_groups()]

    def _time(self, times_B: Tensor, dtype: DType) -> Tensor:
        sinusoid = F.timestep_embedding(times_B * 1000.0, self.arch.frequencies, dtype=dtype).unsqueeze(1)
        time: Tensor = self.tmlp[2](_gelu(self.tmlp[0](sinusoid)))
        return time

    def _shared(self, time_B1D: Tensor) -> Tensor:
        shared: Tensor = self.tproj[1](_gelu(time_B1D))
        return shared

    def _text(self, x_BTC: Tensor) -> Tensor:
        """Returns the text's tokens in the model's width, (B, T, D)."""
        norm, first, _, second = self.txtmlp
        text: Tensor = second(_gelu(first(norm(x_BTC))))
        return text

    def _table(self, text: int, grids: tuple[Grid, ...]) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine (S, 1, E) in fp32 at least; the made image, last in `grids`, stands at 0."""
        like = nn.compute_copy(self.first.weight)
        assert isinstance(like, Tensor)
        key = text, grids, like.dtype, like.device
        if key not in self._tables:
            axis = (*range(1, len(grids)), 0)
            images = [grid(*own, place) for own, place in zip(grids, axis, strict=True)]
            places = np.concatenate([*images, np.zeros((text, 3))])  # a text's tokens are at the origin
            angles = rope_angles(places, self.arch.axes, self.arch.theta)[:, None]
            cos, sin = (tensor(turn(angles), compute_dtype(like.dtype), like.device) for turn in (np.cos, np.sin))
            self._tables[key] = cos, sin
        return self._tables[key]
