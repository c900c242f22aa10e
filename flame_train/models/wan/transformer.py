"""Wan 2.2's denoiser: tokens of a film attend to each other, then to the text (arXiv 2503.20314).

Attribute names are those of the published single file. Activations are channels-last. Shape letters: B batch, F frames
of latents, H height and W width in latent pixels, C channels of the latents, D model width, E width of a head. There
are L tokens of the film and T rows of text. The times of a film are N: one for all of its frames, or one for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype
from flame_train.engine.nn import param
from flame_train.errors import ShapeError
from flame_train.networks.arch import TransformerArch, block_count, shape_of
from flame_train.networks.attention_mlp import attend, feed_forward, remade
from flame_train.networks.block_network import Block, BlockNetwork, Rounded, bounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import patchify, token_grid, unpatchify
from flame_train.networks.modulation import gated, modulated
from flame_train.networks.rope import Angles, Grids, RopeTables, film_axes, grid, rope_angles

PATCH: Final = 2  # the side of a token in latent pixels; it has one frame
FREQUENCIES: Final = 256  # the width of the sinusoid of times
_HEAD: Final = 128  # the width of a head, which no shape tells
_EPS: Final = 1e-6
_THETA: Final = 10000.0
_PARTS: Final = 6  # shift, scale and gate, of attention and of the MLP
_shape: Final = partial(shape_of, "Wan", "a Wan 2.2 transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class WanArch(TransformerArch):
    """Everything that decides the network's shapes."""

    hidden: int
    """The width of the MLPs."""
    channels: int = 48
    """Of the latents."""
    text_dim: int = 4096
    """Of the text encoder's states."""

    @classmethod
    def ti2v_5b(cls) -> Self:
        """Returns Wan 2.2 TI2V-5B."""
        return cls(width=3072, depth=30, hidden=14336)

    @classmethod
    def tiny(cls, text_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(width=256, depth=2, hidden=512, text_dim=text_dim)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says. A head is as wide as published, unless it is stated."""
        width, channels = _shape(shapes, "patch_embedding.weight")[:2]
        head_dim = int(stated.number("attention_head_dim", _HEAD))
        arch = cls(
            width=width,
            depth=block_count(shapes, "blocks"),
            head_dim=head_dim,
            hidden=_shape(shapes, "blocks.0.ffn.0.weight")[0],
            channels=channels,
            text_dim=_shape(shapes, "text_embedding.0.weight")[1],
        )
        stated.require(
            patch_size=(1, PATCH, PATCH),
            num_attention_heads=width // head_dim,
            in_channels=channels,
            out_channels=channels,
            freq_dim=FREQUENCIES,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            eps=_EPS,
            image_dim=None,
            added_kv_proj_dim=None,
            pos_embed_seq_len=None,
        )
        return arch

    @property
    def axes(self) -> tuple[int, int, int]:
        """How many values of a head encode the frame, the row and the column of a token: 44, 42 and 42 of 128."""
        return film_axes(self.head_dim)


def position_angles(arch: WanArch, _: int, frames: Grids) -> Angles:
    """Returns the angle by which each value of all heads is rotated at each token, fp64 (L, D)."""
    places = np.concatenate([grid(*size, image=number) for number, size in enumerate(frames)])
    return np.tile(rope_angles(places, arch.axes, _THETA), arch.width // arch.head_dim)


class PatchEmbedding(nn.Module):
    """Squares of latent pixels to tokens, as a convolution that steps by its kernel."""

    weight: Tensor
    bias: Tensor

    def __init__(self, arch: WanArch) -> None:
        self.weight = param(arch.width, arch.channels, 1, PATCH, PATCH)
        self.bias = param(arch.width, init="zeros")

    def forward(self, x_NHWC: Tensor) -> Tensor:
        """Returns the tokens (N, H W / 4, D) of N frames."""
        weight = nn.compute_copy(self.weight)
        tokens = patchify(x_NHWC, PATCH, channels_first=True)
        return F.linear(tokens, weight.reshape(weight.shape[0], -1), nn.compute_copy(self.bias))


class Attention(nn.Module):
    """Attention of the film's tokens to each other, turned by their places, or to the text's.

    Queries and keys are normalised over all heads at once.
    """

    def __init__(self, arch: WanArch) -> None:
        self.heads = arch.width // arch.head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(arch.width, arch.width) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.width, _EPS) for _ in range(2))

    def forward(self, x_BLD: Tensor, text_BTD: Tensor | None, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        if text_BTD is None:
            q, k, v = nn.grouped_linear([self.q, self.k, self.v], x_BLD)
        else:
            q, (k, v) = self.q(x_BLD), nn.grouped_linear([self.k, self.v], text_BTD)
        q, k = (self._normed(x, norm, turns) for x, norm in ((q, self.norm_q), (k, self.norm_k)))
        return self.o(attend(q, k, v, self.heads))

    def _normed(self, x_BLD: Tensor, norm: nn.RMSNorm, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        if turns is None:
            return norm(x_BLD)
        # neighbours are turned together, so that heads need not be apart
        return F.rms_norm_rope(x_BLD.unsqueeze(2), nn.compute_copy(norm.weight), *turns, _EPS).reshape(x_BLD.shape)


class WanBlock(Block):
    """Self attention, attention to the text and an MLP; the time modulates the first and the last."""

    modulation: Tensor

    def __init__(self, arch: WanArch) -> None:
        self.modulation = param(1, _PARTS, arch.width, init="normal")
        self.self_attn, self.cross_attn = Attention(arch), Attention(arch)
        self.norm3 = nn.LayerNorm(arch.width, _EPS)  # of the attention to the text
        layers = nn.Linear(arch.width, arch.hidden), None, nn.Linear(arch.hidden, arch.width)
        self.ffn = nn.ModuleList(layers)

    def forward(self, x_BLD: Tensor, text_BTD: Tensor, shared: Tensor, cos_L1D: Tensor, sin_L1D: Tensor) -> Tensor:
        """Returns the tokens after the block.

        Args:
            text_BTD: the text in the model's width.
            shared: the part of the modulation that all blocks share, (B, N, 6 D).
        """
        shift, scale, gate, *feed = modulation_rows(self.modulation, shared, x_BLD)
        attended = self.self_attn(modulated(x_BLD, shift, scale), None, (cos_L1D, sin_L1D))
        x_BLD = bounded(gated(x_BLD, gate, attended))
        x_BLD = bounded(x_BLD + self.cross_attn(remade(self.norm3, x_BLD), text_BTD, None))
        return checkpoint(self._fed, x_BLD, *feed) if self.checkpointing == "mlp" else self._fed(x_BLD, *feed)

    def _fed(self, x_BLD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        fed = feed_forward(self.ffn[0], self.ffn[2], modulated(x_BLD, shift, scale))
        return bounded(gated(x_BLD, gate, fed))


def modulation_rows(table: Tensor, shared: Tensor, like: Tensor) -> Sequence[Tensor]:
    """Returns the parts of a modulation, a table (1, P, D) and what the time adds (B, N, P D), summed in fp32 at least.

    They are (B, 1, D) each for one time, (B, N, 1, D) for a time a frame.
    """
    own: Tensor = nn.compute_copy(table)
    exact = compute_dtype(like.dtype)
    rows = (shared.to(exact) + own.to(exact).reshape(1, 1, -1)).to(like.dtype)
    return F.chunk(rows if shared.shape[1] == 1 else rows.unsqueeze(2), own.shape[1], dim=-1)


class Head(nn.Module):
    """A modulated norm, and the way back to a token's numbers."""

    modulation: Tensor

    def __init__(self, arch: WanArch) -> None:
        self.head = nn.Linear(arch.width, PATCH**2 * arch.channels)
        self.modulation = param(1, 2, arch.width, init="normal")

    def forward(self, x_BLD: Tensor, time_BND: Tensor) -> Tensor:
        shift, scale = modulation_rows(self.modulation, F.cat([time_BND, time_BND], dim=-1), x_BLD)
        return self.head(modulated(x_BLD, shift, scale))


class Wan(BlockNetwork):
    """Predicts the velocity of the flow in noised latents of a film."""

    rounded = Rounded(("blocks.*",))

    def __init__(self, arch: WanArch) -> None:
        self.arch = arch
        self.turns = RopeTables(partial(position_angles, arch))
        width = arch.width
        self.patch_embedding = PatchEmbedding(arch)
        self.text_embedding = nn.ModuleList([nn.Linear(arch.text_dim, width), None, nn.Linear(width, width)])
        self.time_embedding = nn.ModuleList([nn.Linear(FREQUENCIES, width), None, nn.Linear(width, width)])
        self.time_projection = nn.ModuleList([None, nn.Linear(width, _PARTS * width)])
        self.blocks = nn.ModuleList([WanBlock(arch) for _ in range(arch.depth)])
        self.head = Head(arch)

    def forward(self, x_BFHWC: Tensor, times: Tensor, context_BTC: Tensor) -> Tensor:
        """Returns the velocity (B, F, H, W, C) for noised latents, which like the states have the dtype of the weights.

        Args:
            times: 1000 times the noise level, fp32: (B,) of a film, or (B, F) of each of its frames.
            context_BTC: a text's states (B, T, text_dim); all rows are looked at.

        Raises:
            ShapeError: latents of other sizes.
        """
        if x_BFHWC.ndim != 5:
            raise ShapeError(f"Wan: expected latents (B, F, H, W, {self.arch.channels}), got {x_BFHWC.shape}")
        B, frames = x_BFHWC.shape[:2]
        x_NHWC = x_BFHWC.reshape(B * frames, *x_BFHWC.shape[2:])
        _, h, w = token_grid("Wan's transformer", x_NHWC, self.arch.channels, PATCH)
        turns = self.turns.of(0, ((h, w),) * frames, nn.compute_copy(self.patch_embedding.bias))
        time_BND = self._time(times, x_BFHWC).reshape(B, -1, self.arch.width)
        shared = self.time_projection[1](F.silu(time_BND))
        text_BTD = self._text(context_BTC)
        x_BLD = self.patch_embedding(x_NHWC).reshape(B, frames * h * w, -1)
        for block in self.blocks:
            x_BLD = block(x_BLD, text_BTD, shared, *turns)
        made = self.head(x_BLD, time_BND).reshape(B * frames, h * w, -1)
        return unpatchify(made, (h, w), PATCH, channels_first=False).reshape(x_BFHWC.shape)

    def _time(self, times: Tensor, like: Tensor) -> Tensor:
        """Returns the vector of each time, (B N, D)."""
        first, _, second = self.time_embedding
        time: Tensor = second(F.silu(first(F.timestep_embedding(times.reshape(-1), FREQUENCIES, dtype=like.dtype))))
        return time

    def _text(self, context_BTC: Tensor) -> Tensor:
        """Returns the text in the model's width, (B, T, D)."""
        first, _, second = self.text_embedding
        text: Tensor = second(F.gelu(first(context_BTC), approximate="tanh"))
        return text

    def fusable_groups(self) -> Sequence[Sequence[nn.Linear]]:
        groups = (
            [[b.self_attn.q, b.self_attn.k, b.self_attn.v], [b.cross_attn.k, b.cross_attn.v]] for b in self.blocks
        )
        return [group for of_block in groups for group in of_block]
