"""SD3's denoiser: two streams, image and text, that attend to each other in every block (MMDiT, arXiv 2403.03206).

Attribute names are those of the published single file below `model.diffusion_model.`. Activations are channels-last.

Shape letters of images: B batch, H height and W width in latent pixels, C latent channels.
Shape letters of tokens: L image tokens, T text tokens, D model width, N heads, E width of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

from flame_train.engine import Tensor, checkpoint, nn, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.nn import param
from flame_train.errors import ModelFileError
from flame_train.networks.arch import TransformerArch, shape_of
from flame_train.networks.attention_mlp import feed_forward
from flame_train.networks.block_network import Block, BlockNetwork, Rounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import token_grid, unpatchify

_PATCH = 2
_FREQUENCIES = 256  # the width of the timestep's sinusoid
_EPS = 1e-6
_shape: Final = partial(shape_of, "MMDiT", "an SD3 transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class MMDiTArch(TransformerArch):
    """Everything that decides the network's shapes, and the width of a head, which SD3 medium's do not tell."""

    head_dim: int = 64
    context_dim: int = 4096
    """Of the text encoders' output."""
    pooled_dim: int
    """Of the CLIPs' pooled output."""
    positions: int = 192
    """Along each side of the table of positions."""
    qk_norm: bool = False
    dual: tuple[int, ...] = ()
    """Blocks in which the image attends to itself as well."""

    @classmethod
    def sd3_medium(cls) -> Self:
        """Returns SD3 medium."""
        return cls(width=1536, depth=24, pooled_dim=2048)

    @classmethod
    def sd35_medium(cls) -> Self:
        """Returns SD3.5 medium: normed queries and keys, thirteen dual blocks, a larger table of positions."""
        return replace(cls.sd3_medium(), positions=384, qk_norm=True, dual=tuple(range(13)))

    @classmethod
    def sd35_large(cls) -> Self:
        """Returns SD3.5 large, and large turbo."""
        return replace(cls.sd3_medium(), width=2432, depth=38, qk_norm=True)

    @classmethod
    def tiny(cls, qk_norm: bool = True, dual: tuple[int, ...] = (0,)) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(
            width=64, depth=3, head_dim=32, context_dim=48, pooled_dim=40, positions=12, qk_norm=qk_norm, dual=dual
        )

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says."""
        width, channels = _shape(shapes, "x_embedder.proj.weight")[:2]
        norm = shapes.get("joint_blocks.0.x_block.attn.ln_q.weight")
        stated.require(patch_size=2, pos_embed_max_size=math.isqrt(_shape(shapes, "pos_embed")[1]))
        return cls(
            width=width,
            depth=len({m[1] for n in shapes if (m := re.match(r"joint_blocks\.(\d+)\.", n))}),
            head_dim=norm[0] if norm else int(stated.number("attention_head_dim", min(64, width // 2))),
            channels=channels,
            context_dim=_shape(shapes, "context_embedder.weight")[1],
            pooled_dim=_shape(shapes, "y_embedder.mlp.0.weight")[1],
            positions=math.isqrt(_shape(shapes, "pos_embed")[1]),
            qk_norm=norm is not None,
            dual=tuple(
                sorted(int(m[1]) for n in shapes if (m := re.match(r"joint_blocks\.(\d+)\.x_block\.attn2\.proj\.w", n)))
            ),
        )


# The inputs of linear layers are rematerialized: their own inputs are saved anyway.


def _modulated(x_BLD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return rematerialize(F.layer_norm_modulate, x_BLD, scale, shift, _EPS)


class Mlp(nn.Module):
    """Two layers with tanh-GELU between."""

    def __init__(self, width: int) -> None:
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return feed_forward(self.fc1, self.fc2, x)


class Projections(nn.Module):
    """One stream's layers of an attention: queries, keys and values, and the output unless `pre_only`."""

    def __init__(self, arch: MMDiTArch, pre_only: bool = False) -> None:
        self.heads = arch.width // arch.head_dim
        self.qkv = nn.Linear(arch.width, 3 * arch.width)
        self.qk_norm = arch.qk_norm
        if arch.qk_norm:
            self.ln_q = nn.RMSNorm(arch.head_dim, _EPS)
            self.ln_k = nn.RMSNorm(arch.head_dim, _EPS)
        if not pre_only:
            self.proj = nn.Linear(arch.width, arch.width)

    def project(self, x_BLD: Tensor) -> Projected:
        """Queries, keys and values as (B, L, N, E), before their norms."""
        B, L, _ = x_BLD.shape
        return self, [part.reshape(B, L, self.heads, -1) for part in F.chunk(self.qkv(x_BLD), 3, dim=-1)]


Projected = tuple[Projections, Sequence[Tensor]]
"""A stream's share of an attention, with its weights."""


def _attend(streams: Sequence[Projected]) -> list[Tensor]:
    """Returns attention over all streams' tokens as one sequence; each stream's own rows (B, L, D)."""
    sides = [by for by, _ in streams]
    queries, keys, values = (list(x) for x in zip(*(parts for _, parts in streams), strict=True))
    q = _joined(queries, [nn.compute_copy(s.ln_q.weight) for s in sides] if sides[0].qk_norm else None)
    k = _joined(keys, [nn.compute_copy(s.ln_k.weight) for s in sides] if sides[0].qk_norm else None)
    v = _joined(values, None)
    o_BLND = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    o_BLD = o_BLND.reshape(*o_BLND.shape[:2], -1)
    ends = [x.shape[1] for x in queries]
    return [o_BLD] if len(ends) == 1 else list(F.split(o_BLD, ends, dim=1))


def _joined(parts: list[Tensor], norms: list[Tensor] | None) -> Tensor:
    if norms is not None:
        return F.cat_rms_norm(parts, norms, dim=1, eps=_EPS)
    return F.cat(parts, dim=1) if len(parts) > 1 else parts[0]


class Stream(nn.Module):
    """One stream's half of a joint block; with `pre_only` it ends in the attention.

    The modulation has shift, scale and gate for attention and MLP, and for the stream's own attention if it is `dual`.
    """

    def __init__(self, arch: MMDiTArch, *, pre_only: bool = False, dual: bool = False) -> None:
        self.pre_only, self.dual = pre_only, dual
        self.attn = Projections(arch, pre_only)
        if dual:
            self.attn2 = Projections(arch)
        if not pre_only:
            self.mlp = Mlp(arch.width)
        rows = 9 if dual else 2 if pre_only else 6
        self.adaLN_modulation = nn.ModuleList([None, nn.Linear(arch.width, rows * arch.width)])

    def modulation(self, silu_c_BD: Tensor) -> list[Tensor]:
        """Returns the rows of the modulation, (B, 1, D) each."""
        modulation = self.adaLN_modulation[1](silu_c_BD)
        rows = modulation.reshape(modulation.shape[0], -1, silu_c_BD.shape[1])
        return [rows[:, i : i + 1] for i in range(rows.shape[1])]

    def project(self, x_BLD: Tensor, m: Sequence[Tensor]) -> Projected:
        """Returns the stream's queries, keys and values for the joint attention."""
        return self.attn.project(_modulated(x_BLD, m[0], m[1]))

    def post_attention(self, x_BLD: Tensor, attended_BLD: Tensor, m: Sequence[Tensor], lean: bool) -> Tensor:
        """Adds the residuals of the joint attention, the stream's own attention and the MLP.

        With `lean` the backward pass recomputes the MLP instead of saving its activations.
        """
        y_BLD = F.gated_add(x_BLD, m[2], self.attn.proj(attended_BLD))
        if self.dual:
            (own_BLD,) = _attend([self.attn2.project(_modulated(x_BLD, m[6], m[7]))])
            y_BLD = F.gated_add(y_BLD, m[8], self.attn2.proj(own_BLD))
        parts = y_BLD, m[3], m[4], m[5]
        return checkpoint(self._feed_forward, *parts) if lean else self._feed_forward(*parts)

    def _feed_forward(self, y_BLD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return F.gated_add(y_BLD, gate, self.mlp(_modulated(y_BLD, shift, scale)))


class JointBlock(Block):
    """Both streams through one attention. The last block drops the text."""

    def __init__(self, arch: MMDiTArch, index: int) -> None:
        self.context_block = Stream(arch, pre_only=index + 1 == arch.depth)
        self.x_block = Stream(arch, dual=index in arch.dual)

    def forward(self, x_BLD: Tensor, c_BTD: Tensor, silu_c_BD: Tensor) -> tuple[Tensor, Tensor]:
        lean = self.checkpointing == "mlp"
        image, text = self.x_block.modulation(silu_c_BD), self.context_block.modulation(silu_c_BD)
        for_x, for_c = _attend([self.x_block.project(x_BLD, image), self.context_block.project(c_BTD, text)])
        x_BLD = self.x_block.post_attention(x_BLD, for_x, image, lean)
        if not self.context_block.pre_only:
            c_BTD = self.context_block.post_attention(c_BTD, for_c, text, lean)
        return x_BLD, c_BTD


class VectorEmbedder(nn.Module):
    """A vector to the model's width: linear, silu, linear."""

    def __init__(self, dim: int, width: int) -> None:
        self.mlp = nn.ModuleList([nn.Linear(dim, width), None, nn.Linear(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp[2](F.silu(self.mlp[0](x)))


class PatchEmbed(nn.Module):
    """Each 2 x 2 latent pixels to one token."""

    def __init__(self, arch: MMDiTArch) -> None:
        self.proj = nn.Conv2d(arch.channels, arch.width, _PATCH, _PATCH)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return self.proj(x_BHWC)


class FinalLayer(nn.Module):
    """Modulation, and the way back to patches: (row, column, channel) of each token."""

    def __init__(self, arch: MMDiTArch) -> None:
        self.linear = nn.Linear(arch.width, _PATCH * _PATCH * arch.channels)
        self.adaLN_modulation = nn.ModuleList([None, nn.Linear(arch.width, 2 * arch.width)])

    def forward(self, x_BLD: Tensor, silu_c_BD: Tensor) -> Tensor:
        B, D = silu_c_BD.shape
        m = self.adaLN_modulation[1](silu_c_BD).reshape(B, 2, D)
        return self.linear(F.layer_norm_modulate(x_BLD, m[:, 1:2], m[:, 0:1], _EPS))


class MMDiT(BlockNetwork):
    """Predicts the velocity of the flow in noised latents. Its blocks are the joint blocks."""

    rounded = Rounded(("joint_blocks.*",), exact=frozenset(("adaLN_modulation",)))

    def __init__(self, arch: MMDiTArch) -> None:
        self.arch = arch
        self.pos_embed = param(1, arch.positions**2, arch.width, init="normal")
        self.x_embedder = PatchEmbed(arch)
        self.t_embedder = VectorEmbedder(_FREQUENCIES, arch.width)
        self.y_embedder = VectorEmbedder(arch.pooled_dim, arch.width)
        self.context_embedder = nn.Linear(arch.context_dim, arch.width)
        self.joint_blocks = nn.ModuleList([JointBlock(arch, i) for i in range(arch.depth)])
        self.final_layer = FinalLayer(arch)

    def forward(self, x_BHWC: Tensor, timesteps_B: Tensor, context_BTC: Tensor, pooled_BP: Tensor) -> Tensor:
        """Returns the velocity (B, H, W, C) for latents of that shape, H and W even and at most twice the table's side.

        timesteps are 1000 times the noise level; context is (B, T, context_dim), pooled (B, pooled_dim). All but the
        timesteps are in the dtype of the weights. Raises ShapeError for other latents.
        """
        B, h, w = token_grid("MMDiT", x_BHWC, self.arch.channels, _PATCH)
        t_BF = F.timestep_embedding(timesteps_B, _FREQUENCIES, dtype=pooled_BP.dtype)
        silu_c_BD = F.silu(self.t_embedder(t_BF) + self.y_embedder(pooled_BP))
        x_BLD = self.x_embedder(x_BHWC).reshape(B, h * w, -1) + self._positions(h, w)
        c_BTD = self.context_embedder(context_BTC)
        for block in self.joint_blocks:
            x_BLD, c_BTD = block(x_BLD, c_BTD, silu_c_BD)
        return unpatchify(self.final_layer(x_BLD, silu_c_BD), (h, w), _PATCH, channels_first=False)

    def _positions(self, h: int, w: int) -> Tensor:
        side, D = self.arch.positions, self.arch.width
        if h > side or w > side:
            raise ModelFileError(
                f"MMDiT: an image of {h} x {w} tokens is larger than the model's {side} x {side} positions; "
                "lower data.resolution"
            )
        top, left = (side - h) // 2, (side - w) // 2
        table = nn.compute_copy(self.pos_embed).reshape(side, side, D)[top : top + h, left : left + w]
        return table.reshape(1, h * w, D)


def joined_context(clip_l_BTD: Tensor, clip_g_BTD: Tensor, t5_BTD: Tensor) -> Tensor:
    """The transformer's context (B, 77 + T, 4096): both CLIPs' states side by side, filled up with zeros, then T5's."""
    clip_BTD = F.cat([clip_l_BTD, clip_g_BTD], dim=-1)
    width = t5_BTD.shape[-1] - clip_BTD.shape[-1]
    return F.cat([F.pad(clip_BTD, (0, width)), t5_BTD], dim=1)
