"""The blocks that Flux.1, its relative Chroma and FLUX.2 share: two streams in one attention, and one stream.

A subclass says where shift, scale and gate come from. Attribute names are those of the published single files. Shape
letters: B batch, L image tokens, T text tokens, S = T + L, D model width, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.nn import param
from flame_train.networks.arch import Shapes, TransformerArch, block_count
from flame_train.networks.attention_mlp import feed_forward
from flame_train.networks.block_network import Block, bounded
from flame_train.networks.modulation import modulated
from flame_train.networks.rope import Angles, Grids, grid, image_axes, rope_angles


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleSingleArch(TransformerArch):
    """`depth` counts the blocks with a stream for the image and one for the text."""

    single_depth: int
    """Blocks with one stream for image and text."""


def block_sizes(shape: Callable[[Shapes, str], tuple[int, ...]], shapes: Shapes) -> dict[str, int]:
    """Returns the sizes that names and shapes of the blocks tell, by field; `shape` raises for a missing tensor."""
    return {
        "width": shape(shapes, "img_in.weight")[0],
        "depth": block_count(shapes, "double_blocks"),
        "single_depth": block_count(shapes, "single_blocks"),
        "head_dim": shape(shapes, "double_blocks.0.img_attn.norm.query_norm.scale")[0],
        "context_dim": shape(shapes, "txt_in.weight")[1],
    }


_THETA: Final = 10000.0


def position_angles(head_dim: int, text: int, grids: Grids) -> Angles:
    """Returns the angle by which each value of a head is rotated at each token, fp64 (S, E); text is at the origin."""
    images = [grid(*size, image=number) for number, size in enumerate(grids)]
    return rope_angles(np.concatenate([np.zeros((text, 3)), *images]), image_axes(head_dim), _THETA)


EPS: Final = 1e-6
_MLP_RATIO: Final = 4


class RMSNorm(nn.Module):
    """The scale of RMS normalization over a head's values, under the published name; `attend` applies it."""

    scale: Tensor

    def __init__(self, dim: int) -> None:
        self.scale = param(dim, init="ones")


class QKNorm(nn.Module):
    """RMS normalization of each head's queries and keys."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.query_norm = RMSNorm(dim)
        self.key_norm = RMSNorm(dim)


Stream = tuple[QKNorm, Sequence[Tensor]]
"""A stream's queries, keys and values, (B, L, D) each, and their norms."""


FeedForward = Callable[[nn.ModuleList, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(mlp, tokens, shift, scale, gate) to the tokens after an MLP."""


def attend(
    streams: Sequence[Stream],
    cos_S1E: Tensor,
    sin_S1E: Tensor,
    mask: Tensor | None = None,
    seen_B: Tensor | None = None,
) -> Tensor:
    """Returns what all tokens find, (B, S, D): attention of all streams, queries and keys turned by positions.

    Args:
        streams: queries, keys and values of each stream, and their norms.
    """
    norms = [norm for norm, _ in streams]
    queries, keys, values = zip(*([x.reshape(*x.shape[:2], -1, n.dim) for x in p] for n, p in streams), strict=True)
    q = F.cat_rms_norm(queries, [nn.compute_copy(n.query_norm.scale) for n in norms], cos_S1E, sin_S1E, 1, EPS)
    k = F.cat_rms_norm(keys, [nn.compute_copy(n.key_norm.scale) for n in norms], cos_S1E, sin_S1E, 1, EPS)
    v = values[0] if len(values) == 1 else F.cat(values, dim=1)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(*heads, mask, key_value_seq_lengths=seen_B)
    return attended.transpose(1, 2).reshape(*q.shape[:2], -1)


class Projections(nn.Module):
    """One stream's way into the joint attention and out of it."""

    def __init__(self, width: int, head_dim: int) -> None:
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = QKNorm(head_dim)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Stream:
        return self.norm, F.chunk(self.qkv(x_BLD), 3, dim=-1)


def gelu_mlp(width: int) -> nn.ModuleList:
    """Returns the layers linear, gelu, linear; entry 1 is the activation, which holds no weights."""
    return nn.ModuleList([nn.Linear(width, _MLP_RATIO * width), None, nn.Linear(_MLP_RATIO * width, width)])


def gelu_feed_forward(mlp: nn.ModuleList, x_BLD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    """Returns the tokens after a modulated MLP.

    Args:
        mlp: its layers, as `gelu_mlp` makes them.
        shift, scale, gate: its modulation, (B, 1, D) each.
    """
    return F.gated_add(x_BLD, gate, feed_forward(mlp[0], mlp[2], modulated(x_BLD, shift, scale)))


def _beside(found_BSD: Tensor, hidden_BSF: Tensor) -> Tensor:
    return F.cat_gelu(found_BSD, hidden_BSF, approximate="tanh")


class DoubleStreamBase(Block):
    """Image and text, with separate weights, in one joint attention; a subclass makes the parts and the modulation."""

    img_attn: Any
    txt_attn: Any
    img_mlp: nn.ModuleList
    txt_mlp: nn.ModuleList

    def streams(
        self,
        feed_forward: FeedForward,
        img_BLD: Tensor,
        txt_BTD: Tensor,
        of_img: Sequence[Tensor],
        of_txt: Sequence[Tensor],
        cos_S1E: Tensor,
        sin_S1E: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the image's and the text's tokens after joint attention and each stream's own MLP.

        Args:
            feed_forward: the MLP with its modulation.
            of_img, of_txt: shift, scale and gate (B, 1, D) of attention and MLP, of each stream.
        """
        shift_i, scale_i, gate_i, *feed_i = of_img
        shift_t, scale_t, gate_t, *feed_t = of_txt
        img = modulated(img_BLD, shift_i, scale_i)
        txt = modulated(txt_BTD, shift_t, scale_t)
        found_BSD = attend([self.txt_attn(txt), self.img_attn(img)], cos_S1E, sin_S1E, mask)
        for_txt, for_img = F.split(found_BSD, [txt_BTD.shape[1], img_BLD.shape[1]], dim=1)
        img_BLD = F.gated_add(img_BLD, gate_i, self.img_attn.proj(for_img))
        txt_BTD = F.gated_add(txt_BTD, gate_t, self.txt_attn.proj(for_txt))
        if self.checkpointing == "mlp":
            return (
                checkpoint(feed_forward, self.img_mlp, img_BLD, *feed_i),
                bounded(checkpoint(feed_forward, self.txt_mlp, txt_BTD, *feed_t)),
            )
        return feed_forward(self.img_mlp, img_BLD, *feed_i), bounded(feed_forward(self.txt_mlp, txt_BTD, *feed_t))


class SingleStreamBase(Block):
    """Text and image as one sequence; attention and MLP side by side, each a part of two wide layers."""

    has_feed_forward = False  # its MLP begins in one layer with the attention: there is nothing to gain by it alone

    def __init__(self, width: int, head_dim: int) -> None:
        hidden = _MLP_RATIO * width
        self.parts = (width, width, width, hidden)
        self.linear1 = nn.Linear(width, sum(self.parts))
        self.linear2 = nn.Linear(width + hidden, width)
        self.norm = QKNorm(head_dim)

    def stream(
        self, x_BSD: Tensor, modulation: Sequence[Tensor], cos_S1E: Tensor, sin_S1E: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Returns the tokens after attention and MLP.

        Args:
            modulation: shift, scale and gate, (B, 1, D) each.
        """
        shift, scale, gate = modulation
        projected = self.linear1(modulated(x_BSD, shift, scale))
        *qkv, hidden = F.split(projected, self.parts, dim=-1)
        found_BSD = attend([(self.norm, qkv)], cos_S1E, sin_S1E, mask)
        return bounded(F.gated_add(x_BSD, gate, self.linear2(rematerialize(_beside, found_BSD, hidden))))
