"""Anima's denoiser: that of Cosmos-Predict2 (arXiv 2503.14492, 2511.00062) for a single image.

Attribute names are those of the published single file. Activations are channels-last. No layer has a bias. Shape
letters: B batch, H height and W width in latent pixels, C latent channels. L image tokens, T text tokens, D model
width, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn, rematerialize, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, compute_dtype
from flame_train.errors import ModelFileError
from flame_train.networks.arch import TransformerArch, block_count, shape_of
from flame_train.networks.block_network import Block, BlockNetwork, Rounded, bounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import patched, token_grid, unpatchify
from flame_train.networks.modulation import modulated
from flame_train.networks.rope import film_axes

PATCH: Final = 2  # the side of a token in latent pixels
_EPS: Final = 1e-6
_HEAD_EPS: Final = 1e-5  # of queries and keys
_THETA: Final = 10000.0
_STRETCH: Final = (1.0, 4.0, 4.0)  # of the axes of time, rows and columns, to sizes beyond those trained first
MODULATIONS: Final = tuple(f"adaln_modulation_{part}" for part in ("self_attn", "cross_attn", "mlp"))
_shape: Final = partial(shape_of, "Anima", "Anima's transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnimaArch(TransformerArch):
    """Everything that decides the network's shapes, and how far its positions are stretched."""

    hidden: int
    """The width of the MLPs."""
    context_dim: int = 1024
    """Of the text."""
    rank: int = 256
    """Of each block's own part of the modulation."""
    stretch: tuple[float, float, float] = _STRETCH

    @classmethod
    def base(cls) -> Self:
        """Returns Anima, of 2.0 billion weights."""
        return cls(width=2048, depth=28, hidden=8192)

    @classmethod
    def deep(cls) -> Self:
        """Returns Anima-2.9B: the same, made deeper by a community."""
        return cls(width=2048, depth=40, hidden=8192)

    @classmethod
    def tiny(cls, context_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(width=64, depth=2, head_dim=32, hidden=256, context_dim=context_dim, rank=16)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says. Refuses the variants that take films."""
        width, features = _shape(shapes, "x_embedder.proj.1.weight")
        out_features = _shape(shapes, "final_layer.linear.weight")[0]
        if features != out_features + PATCH**2:
            raise ModelFileError(
                f"Anima: expected one channel beside those of the latents, found {features // PATCH**2} for "
                f"{out_features // PATCH**2}: this is a model for films, which is not trained here"
            )
        (head_dim,) = _shape(shapes, "blocks.0.self_attn.q_norm.weight")
        arch = cls(
            width=width,
            depth=block_count(shapes, "blocks"),
            head_dim=head_dim,
            hidden=_shape(shapes, "blocks.0.mlp.layer1.weight")[0],
            channels=out_features // PATCH**2,
            context_dim=_shape(shapes, "blocks.0.cross_attn.k_proj.weight")[1],
            rank=_shape(shapes, "blocks.0.adaln_modulation_self_attn.1.weight")[0],
            stretch=_stretch(stated),
        )
        stated.require(
            num_attention_heads=width // head_dim,
            attention_head_dim=head_dim,
            mlp_ratio=arch.hidden / width,
            patch_size=(1, PATCH, PATCH),
            concat_padding_mask=True,
            extra_pos_embed_type=None,
            use_crossattn_projection=False,
            img_context_dim_in=None,
            controlnet_block_every_n=None,
        )
        return arch

    @property
    def axes(self) -> tuple[int, int, int]:
        """How many values of a head encode time (always 0 here), the row and the column of a token."""
        return film_axes(self.head_dim)


def _stretch(stated: Stated) -> tuple[float, float, float]:
    scales = stated.values.get("rope_scale", list(_STRETCH))
    if (
        not isinstance(scales, list)
        or len(scales) != 3
        or not all(isinstance(x, int | float) and x > 0 for x in scales)
    ):
        raise ModelFileError(
            f"{stated.path}: rope_scale: expected three positive numbers, got {scales!r}; mend the file"
        )
    return float(scales[0]), float(scales[1]), float(scales[2])


def position_angles(arch: AnimaArch, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """The angle by which each number of a head is turned at each token, fp64 (L, E); pairs lie half a head apart.

    An axis of n numbers is stretched by s through the base of its frequencies, 10000 s^(n / (n - 2)).
    """
    places = (np.zeros(rows * columns), np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows))
    turns = []
    for place, dim, stretch in zip(places, arch.axes, arch.stretch, strict=True):
        theta = _THETA * stretch ** (dim / (dim - 2))
        turns.append(np.outer(place, theta ** (-np.arange(0, dim, 2) / dim)))
    return np.tile(np.concatenate(turns, axis=1), 2)


class PatchEmbed(nn.Module):
    """Squares of latent pixels, and of a mask of padding that an image has none of, to tokens."""

    def __init__(self, arch: AnimaArch) -> None:
        self.proj = nn.ModuleList([None, nn.Linear((arch.channels + 1) * PATCH**2, arch.width, bias=False)])

    def forward(self, x_BHWC: Tensor) -> Tensor:
        tokens = patched(F.pad(x_BHWC, (0, 1)), PATCH)
        return self.proj[1](tokens.reshape(tokens.shape[0], -1, tokens.shape[3]))


class TimestepEmbedding(nn.Module):
    """A time's sinusoid to the modulation that all blocks share: linear, silu, linear."""

    def __init__(self, width: int) -> None:
        self.linear_1 = nn.Linear(width, width, bias=False)
        self.linear_2 = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x_BD)))


def _modulation(arch: AnimaArch, rows: int) -> nn.ModuleList:
    """Returns a block's own part of the modulation; entry 0 is the activation, which holds no weights."""
    down = nn.Linear(arch.width, arch.rank, bias=False)
    return nn.ModuleList([None, down, nn.Linear(arch.rank, rows * arch.width, bias=False)])


def _modulate(layers: nn.ModuleList, silu_time_BD: Tensor, shared: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Shift and scale, and the gate if there are three, (B, 1, D) each: a block's own part and the shared one."""
    modulation = layers[2](layers[1](silu_time_BD)) + shared
    return F.chunk(modulation.unsqueeze(1), rows, dim=-1)


class Attention(nn.Module):
    """Attention of image tokens to each other, turned by their places, or to the text's."""

    def __init__(self, arch: AnimaArch, context_dim: int) -> None:
        self.head_dim = arch.head_dim
        self.q_proj = nn.Linear(arch.width, arch.width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(context_dim, arch.width, bias=False) for _ in range(2))
        self.output_proj = nn.Linear(arch.width, arch.width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(arch.head_dim, _HEAD_EPS) for _ in range(2))

    def forward(self, x_BLD: Tensor, context_BTC: Tensor | None, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        if context_BTC is None:
            projected = nn.grouped_linear([self.q_proj, self.k_proj, self.v_proj], x_BLD)
        else:
            projected = (self.q_proj(x_BLD), *nn.grouped_linear([self.k_proj, self.v_proj], context_BTC))
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in projected)
        q, k = (self._normed(x, norm, turns) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        attended = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return self.output_proj(attended.transpose(1, 2).reshape(x_BLD.shape))

    def _normed(self, x_BLNE: Tensor, norm: nn.RMSNorm, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        if turns is None:
            return norm(x_BLNE)
        return F.rms_norm_rope(x_BLNE, nn.compute_copy(norm.weight), *turns, _HEAD_EPS, interleaved=False)


class Mlp(nn.Module):
    """linear, gelu, linear. The input of the second is rematerialized."""

    def __init__(self, arch: AnimaArch) -> None:
        self.layer1 = nn.Linear(arch.width, arch.hidden, bias=False)
        self.layer2 = nn.Linear(arch.hidden, arch.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.layer2(rematerialize(F.gelu, self.layer1(x_BLD)))


class TransformerBlock(Block):
    """Self attention, cross attention and MLP, each behind a modulated norm and before a gate."""

    def __init__(self, arch: AnimaArch) -> None:
        self.self_attn = Attention(arch, arch.width)
        self.cross_attn = Attention(arch, arch.context_dim)
        self.mlp = Mlp(arch)
        self.adaln_modulation_self_attn = _modulation(arch, 3)
        self.adaln_modulation_cross_attn = _modulation(arch, 3)
        self.adaln_modulation_mlp = _modulation(arch, 3)

    def forward(
        self, x_BLD: Tensor, context_BTC: Tensor, silu_time_BD: Tensor, shared: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Returns the tokens after the block.

        Args:
            silu_time_BD: the time's vector (B, D), behind its activation.
            shared: the part of the modulation that all blocks share, (B, 3 D).
        """
        shift, scale, gate = _modulate(self.adaln_modulation_self_attn, silu_time_BD, shared, 3)
        attended = self.self_attn(modulated(x_BLD, shift, scale), None, (cos, sin))
        x_BLD = bounded(F.gated_add(x_BLD, gate, attended))
        shift, scale, gate = _modulate(self.adaln_modulation_cross_attn, silu_time_BD, shared, 3)
        attended = self.cross_attn(modulated(x_BLD, shift, scale), context_BTC, None)
        x_BLD = bounded(F.gated_add(x_BLD, gate, attended))
        feed = _modulate(self.adaln_modulation_mlp, silu_time_BD, shared, 3)
        return checkpoint(self._fed, x_BLD, *feed) if self.checkpointing == "mlp" else self._fed(x_BLD, *feed)

    def _fed(self, x_BLD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        return bounded(F.gated_add(x_BLD, gate, self.mlp(modulated(x_BLD, shift, scale))))


class FinalLayer(nn.Module):
    """A modulated norm, and the way back to a token's features."""

    def __init__(self, arch: AnimaArch) -> None:
        self.linear = nn.Linear(arch.width, PATCH**2 * arch.channels, bias=False)
        self.adaln_modulation = _modulation(arch, 2)

    def forward(self, x_BLD: Tensor, silu_time_BD: Tensor, shared: Tensor) -> Tensor:
        D = x_BLD.shape[-1]
        shift, scale = _modulate(self.adaln_modulation, silu_time_BD, shared[:, : 2 * D], 2)
        return self.linear(F.layer_norm_modulate(x_BLD, scale, shift, _EPS))


class Anima(BlockNetwork):
    """Predicts the velocity of the flow in noised latents."""

    # Comfy-Org's recipes and convert_to_quant leave out the first block, and the second's modulation
    rounded = Rounded(
        ("blocks.*",), exact=frozenset(MODULATIONS), unless_rotated=("blocks.0.*", "blocks.1.adaln_modulation*")
    )

    def __init__(self, arch: AnimaArch) -> None:
        self.arch = arch
        # one entry a shape, for as long as the model lives: captured steps read them at their addresses
        self._turns: dict[tuple[int, int, DType, str], tuple[Tensor, Tensor]] = {}
        self.x_embedder = PatchEmbed(arch)
        self.t_embedder = nn.ModuleList([None, TimestepEmbedding(arch.width)])
        self.t_embedding_norm = nn.RMSNorm(arch.width, _EPS)
        self.blocks = nn.ModuleList([TransformerBlock(arch) for _ in range(arch.depth)])
        self.final_layer = FinalLayer(arch)

    def forward(self, x_BHWC: Tensor, times_B: Tensor, context_BTC: Tensor) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents, which like the text have the dtype of the weights.

        Args:
            context_BTC: the text (B, T, context_dim), whose padding is looked at.

        Raises:
            ShapeError: latents of other sizes.
        """
        _, h, w = token_grid("Anima's transformer", x_BHWC, self.arch.channels, PATCH)
        sinusoid_BD = F.timestep_embedding(times_B, self.arch.width, dtype=x_BHWC.dtype)
        shared = self.t_embedder[1](sinusoid_BD)
        silu_time_BD = F.silu(self.t_embedding_norm(sinusoid_BD))
        turns = self._turn(h, w)
        x_BLD = self.x_embedder(x_BHWC)
        for block in self.blocks:
            x_BLD = block(x_BLD, context_BTC, silu_time_BD, shared, *turns)
        return unpatchify(self.final_layer(x_BLD, silu_time_BD, shared), (h, w), PATCH, channels_first=False)

    def fusable_groups(self) -> Sequence[Sequence[nn.Linear]]:
        attentions = [a for block in self.blocks for a in (block.self_attn, block.cross_attn)]
        return [
            [a.k_proj, a.v_proj] if a.k_proj.in_features != a.q_proj.in_features else [a.q_proj, a.k_proj, a.v_proj]
            for a in attentions
        ]

    def _turn(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the rotary angles, (L, 1, E), in fp32 at least."""
        like = nn.compute_copy(self.t_embedding_norm.weight)
        key = rows, columns, compute_dtype(like.dtype), like.device
        if key not in self._turns:
            angles = position_angles(self.arch, rows, columns)[:, None]
            cos, sin = (tensor(turn(angles), key[2], like.device) for turn in (np.cos, np.sin))
            self._turns[key] = cos, sin
        return self._turns[key]
