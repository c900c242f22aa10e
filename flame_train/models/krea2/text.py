"""How Krea 2 makes one sequence of the text encoder's states after many layers.

Shape letters: B batch, T text tokens, N layers of the text encoder, C width of its states.
"""

from __future__ import annotations

from flame_train.engine import Tensor, nn
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.parts import Attention, FeedForward, ZeroCentredNorm
from flame_train.networks.blocks import Block


class TextBlock(Block):
    """Attention and the gated network, each behind a norm and around a residual; nothing has a place."""

    has_feed_forward = False

    def __init__(self, arch: Krea2Arch) -> None:
        self.prenorm, self.postnorm = (ZeroCentredNorm(arch.text_dim, arch.eps) for _ in range(2))
        self.attn = Attention(arch.text_dim, arch.text_heads, arch.text_kv_heads, arch.eps)
        self.mlp = FeedForward(arch.text_dim, arch.text_hidden)

    def forward(self, x_BTC: Tensor, seen_B: Tensor | None) -> Tensor:
        x_BTC = self.attn(self.prenorm(x_BTC), seen_B, None, x_BTC)
        return self.mlp(self.postnorm(x_BTC), x_BTC)


class TextFusion(nn.Module):
    """Blocks over the states of each token, their weighted sum, and blocks over the tokens."""

    def __init__(self, arch: Krea2Arch) -> None:
        self.layerwise_blocks = nn.ModuleList([TextBlock(arch) for _ in range(arch.layerwise)])
        self.projector = nn.Linear(arch.text_layers, 1, bias=False)
        self.refiner_blocks = nn.ModuleList([TextBlock(arch) for _ in range(arch.refiners)])

    def forward(self, states_BTNC: Tensor, seen_B: Tensor) -> Tensor:
        """One state a token (B, T, C), of those after N layers; `seen_B`, int32 (B,), tokens are looked at."""
        B, T, N, C = states_BTNC.shape
        x = states_BTNC.reshape(B * T, N, C)
        for block in self.layerwise_blocks:
            x = block(x, None)
        x_BTC = self.projector(x.transpose(1, 2)).reshape(B, T, C)
        for block in self.refiner_blocks:
            x_BTC = block(x_BTC, seen_B)
        return x_BTC
