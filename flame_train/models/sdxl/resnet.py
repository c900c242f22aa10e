"""The residual blocks of a UNet, and the halving and doubling of its resolution (Latent Diffusion, arXiv 2112.10752).

Shape letters: B batch, H height and W width in latent pixels, C channels, E embedding.
"""

from __future__ import annotations

from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.networks.block_network import Block


class ResBlock(Block):
    """Two convolutions with the time embedding added between them, around a residual.

    The `None` entries stand for the checkpoint's activations and dropout, which hold no weights.
    """

    has_feed_forward = False

    def __init__(self, in_channels: int, out_channels: int, emb_dim: int, groups: int, eps: float) -> None:
        """Declares the weights.

        Args:
            in_channels, out_channels: of the input and the result.
            emb_dim: width of the time embedding.
            groups, eps: of the norms.
        """
        self.in_layers = nn.ModuleList(
            [
                nn.GroupNorm(groups, in_channels, eps, silu=True),
                None,
                nn.Conv2d(in_channels, out_channels, 3, 1, 1),
            ]
        )
        self.emb_layers = nn.ModuleList([None, nn.Linear(emb_dim, out_channels)])
        self.out_layers = nn.ModuleList(
            [
                nn.GroupNorm(groups, out_channels, eps, silu=True),
                None,
                None,
                nn.Conv2d(out_channels, out_channels, 3, 1, 1),
            ]
        )
        self.has_skip = in_channels != out_channels
        if self.has_skip:
            self.skip_connection = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x_BHWC: Tensor, silu_emb_BE: Tensor, skip_BHWC: Tensor | None = None) -> Tensor:
        """Gives the block's result for x with what came past lower resolutions behind its channels, if anything did."""
        emb_BC = self.emb_layers[1](silu_emb_BE)
        h_BHWC = self.in_layers[2](_norm_silu(self.in_layers[0], x_BHWC, other=skip_BHWC))
        h_BHWC = self.out_layers[3](_norm_silu(self.out_layers[0], h_BHWC, shift=emb_BC))
        return self._shortcut(x_BHWC, skip_BHWC, h_BHWC)

    def _shortcut(self, x_BHWC: Tensor, skip_BHWC: Tensor | None, h_BHWC: Tensor) -> Tensor:
        """Returns h and the input, by a product that reads both of its parts where they lie and adds to h."""
        if not self.has_skip:
            return x_BHWC + h_BHWC
        conv = self.skip_connection
        if conv.adapter is not None:
            return conv(x_BHWC if skip_BHWC is None else F.cat([x_BHWC, skip_BHWC], dim=-1)) + h_BHWC
        weight, bias, own = nn.compute_copy(conv.weight)[:, :, 0, 0], nn.compute_copy(conv.bias), x_BHWC.shape[-1]
        if skip_BHWC is not None:
            h_BHWC = F.linear_add(skip_BHWC, weight[:, own:], None, h_BHWC)
        return F.linear_add(x_BHWC, weight[:, :own], bias, h_BHWC)


def _norm_silu(norm: nn.GroupNorm, x_BHWC: Tensor, other: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """Returns silu(norm([x, other] + shift)), which are not put together first."""
    out: Tensor = F.cat_group_norm_silu(
        x_BHWC,
        other,
        norm.num_groups,
        nn.compute_copy(norm.weight),
        nn.compute_copy(norm.bias),
        shift=shift,
        eps=norm.eps,
    )
    return out


class Downsample(nn.Module):
    """Half the resolution, by a convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return self.op(x_BHWC)


class Upsample(nn.Module):
    """Twice the resolution: each pixel repeated, then a convolution."""

    def __init__(self, channels: int) -> None:
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return self.conv(F.upsample_nearest(x_BHWC, 2, layout="NHWC"))
