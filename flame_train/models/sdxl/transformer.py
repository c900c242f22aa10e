"""The transformer inside a UNet (Latent Diffusion, arXiv 2112.10752): self attention, cross attention, GEGLU.

Shape letters: B batch, L image positions, T text positions, C channels, H heads, D channels a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flame_train.engine import Tensor, checkpoint, nn
from flame_train.engine import functional as F
from flame_train.networks.attention_mlp import attend, remade, remultiplied
from flame_train.networks.block_network import Block


class Attention(nn.Module):
    """Attention from an image to itself, or to a text whose keys and values are given."""

    def __init__(self, channels: int, context_dim: int, heads: int) -> None:
        self.heads = heads
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_dim, channels, bias=False)
        self.to_v = nn.Linear(context_dim, channels, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x_BLC: Tensor, text_BTC: tuple[Tensor, Tensor] | None, residual_BLC: Tensor) -> Tensor:
        """residual + attention of x to itself, or to the text's (keys, values)."""
        if text_BTC is None:
            q_BLC, k_BTC, v_BTC = nn.grouped_linear([self.to_q, self.to_k, self.to_v], x_BLC)
        else:
            q_BLC, (k_BTC, v_BTC) = self.to_q(x_BLC), text_BTC
        return self.to_out[0](attend(q_BLC, k_BTC, v_BTC, self.heads), residual_BLC)


NARROW: Final = 640
"""Up to this width, and from LARGE on, GEGLU's input is rematerialized.

It is eight times as wide as the image. Its arithmetic for each byte grows with the width: at 640 it takes about as long
as a norm, at 1280 twice as long.
"""


class GegluProjection(nn.Module):
    """To value and gate in one product, then value * gelu(gate)."""

    def __init__(self, channels: int, hidden: int) -> None:
        self.proj = nn.Linear(channels, 2 * hidden)

    def forward(self, x_BLC: Tensor) -> Tensor:
        if self.proj.in_features <= NARROW:
            return F.geglu(remultiplied(self.proj, x_BLC))
        return remade(F.geglu, self.proj(x_BLC))


class FeedForward(nn.Module):
    """The gated two-layer network; entry 1 is the checkpoint's dropout, which holds no weights."""

    def __init__(self, channels: int) -> None:
        self.net = nn.ModuleList([GegluProjection(channels, 4 * channels), None, nn.Linear(4 * channels, channels)])

    def forward(self, x_BLC: Tensor, residual_BLC: Tensor) -> Tensor:
        return self.net[2](self.net[0](x_BLC), residual_BLC)


class TransformerBlock(Block):
    """Self attention, cross attention and feed-forward, each behind a layer norm and around a residual."""

    def __init__(self, channels: int, context_dim: int, heads: int) -> None:
        self.attn1 = Attention(channels, channels, heads)
        self.ff = FeedForward(channels)
        self.attn2 = Attention(channels, context_dim, heads)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))

    def forward(self, x_BLC: Tensor, k_BTC: Tensor, v_BTC: Tensor) -> Tensor:
        """Computes the block; k and v are the text's, as its cross attention projects it."""
        x_BLC = self.attn1(remade(self.norm1, x_BLC), None, x_BLC)
        x_BLC = self.attn2(remade(self.norm2, x_BLC), (k_BTC, v_BTC), x_BLC)
        return checkpoint(self._feed_forward, x_BLC) if self.checkpointing == "mlp" else self._feed_forward(x_BLC)

    def _feed_forward(self, x_BLC: Tensor) -> Tensor:
        return self.ff(remade(self.norm3, x_BLC), x_BLC)


TextKeys = Mapping[TransformerBlock, tuple[Tensor, Tensor]]
"""Each block's keys and values of the text."""


class SpatialTransformer(nn.Module):
    """A feature map as a sequence of positions, through transformer blocks, around a residual."""

    def __init__(
        self, channels: int, depth: int, context_dim: int, heads: int, groups: int, linear: bool = True
    ) -> None:
        """Declares the layers.

        Args:
            channels: C of the feature map.
            depth: number of transformer blocks.
            context_dim: width of the text's tokens.
            heads: number of attention heads.
            groups: groups of the group norm.
            linear: whether the projections in and out are linear layers; else they are 1x1 convolutions.
        """

        def projection() -> nn.Linear | nn.Conv2d:
            return nn.Linear(channels, channels) if linear else nn.Conv2d(channels, channels, 1)

        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.proj_in = projection()
        self.transformer_blocks = nn.ModuleList([TransformerBlock(channels, context_dim, heads) for _ in range(depth)])
        self.proj_out = projection()

    def forward(self, x_BHWC: Tensor, text: TextKeys) -> Tensor:
        B, H, W, C = x_BHWC.shape
        h_BLC = _projected(self.proj_in, self.norm(x_BHWC)).reshape(B, H * W, C)
        for block in self.transformer_blocks:
            h_BLC = block(h_BLC, *text[block])
        return _projected(self.proj_out, h_BLC.reshape(B, H, W, C), x_BHWC)


def _projected(layer: nn.Linear | nn.Conv2d, x_BHWC: Tensor, residual_BHWC: Tensor | None = None) -> Tensor:
    """Returns the residual, if there is one, and the projection; that of a bare 1x1 convolution is a product too."""
    if isinstance(layer, nn.Linear):
        return layer(x_BHWC, residual_BHWC)
    if layer.adapter is not None:
        made: Tensor = layer(x_BHWC)
        return made if residual_BHWC is None else made + residual_BHWC
    weight, bias = nn.compute_copy(layer.weight)[:, :, 0, 0], nn.compute_copy(layer.bias)
    if residual_BHWC is None:
        return F.linear(x_BHWC, weight, bias)
    return F.linear_add(x_BHWC, weight, bias, residual_BHWC)
