"""What Krea 2's blocks are made of: zero-centred norms, gated attention and networks, and the fusion of text states.

Attribute names are those of the published single file. Shape letters: B batch, S tokens, D width, N heads of queries,
E width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flame_train.engine import Tensor, elementwise, nn, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype
from flame_train.engine.nn import param
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.networks.block_network import Block

# The inputs of linear layers are rematerialized: their own inputs have the same size and are saved anyway.


@elementwise
def modulated(normed: Any, weight: Any, scale: Any, shift: Any) -> Any:
    """normed * (1 + weight) * (1 + scale) + shift: what follows a norm with its zero-centred weight"""
    return normed * (1.0 + weight) * (1.0 + scale) + shift


@elementwise
def gated(found: Any, gate: Any) -> Any:
    """found * sigmoid(gate) (arXiv 2505.06708)"""
    return found * F.sigmoid(gate)


@elementwise
def swish_gated(gate: Any, value: Any) -> Any:
    """silu(gate) * value (arXiv 2002.05202)"""
    return F.silu(gate) * value


class ZeroCentredNorm(nn.Module):
    """rms_norm(x) * (1 + scale) over the last dim; 1 + scale is never rounded to 16 bits."""

    scale: Tensor

    def __init__(self, dim: int, eps: float) -> None:
        self.dim, self.eps = dim, eps
        self.scale = param(dim, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x, (self.dim,), self.weight, self.eps)
        return normed.to(x.dtype)

    @property
    def weight(self) -> Tensor:
        """1 + scale, (D,), in fp32 at least."""
        own: Tensor = nn.compute_copy(self.scale)
        return own.to(compute_dtype(own.dtype)) + 1.0

    def modulated(self, x_BSD: Tensor, scale_B1D: Tensor, shift_B1D: Tensor) -> Tensor:
        """Returns the norm of x, times 1 + scale_B1D, plus shift_B1D; rematerialized."""
        return rematerialize(_modulated, x_BSD, nn.compute_copy(self.scale), scale_B1D, shift_B1D, self.eps)

    def modulated_apart(self, x_BSD: Tensor, clean: Sequence[Tensor], rest: Sequence[Tensor], M: int) -> Tensor:
        """`modulated` with a scale and a shift for the first M tokens, and others for the rest; rematerialized."""
        return rematerialize(_apart, x_BSD, nn.compute_copy(self.scale), *clean, *rest, M, self.eps)


def _apart(
    x_BSD: Tensor,
    weight_D: Tensor,
    clean_scale_B1D: Tensor,
    clean_shift_B1D: Tensor,
    scale_B1D: Tensor,
    shift_B1D: Tensor,
    M: int,
    eps: float,
) -> Tensor:
    """Returns `_modulated` of both parts, side by side."""
    first = _modulated(x_BSD[:, :M], weight_D, clean_scale_B1D, clean_shift_B1D, eps)
    return F.cat([first, _modulated(x_BSD[:, M:], weight_D, scale_B1D, shift_B1D, eps)], dim=1)


def _modulated(x_BSD: Tensor, weight_D: Tensor, scale_B1D: Tensor, shift_B1D: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(x_BSD, (x_BSD.shape[-1],), None, eps)
    out: Tensor = modulated(normed, weight_D, scale_B1D, shift_B1D)
    return out.to(x_BSD.dtype)


class QKNorm(nn.Module):
    """The norms of queries and keys, along each head."""

    def __init__(self, head_dim: int, eps: float) -> None:
        self.qnorm, self.knorm = (ZeroCentredNorm(head_dim, eps) for _ in range(2))


class Attention(nn.Module):
    """Attention whose keys and values are shared by several heads, and whose output has a gate."""

    def __init__(self, width: int, heads: int, kv_heads: int, eps: float) -> None:
        self.head_dim, self.grouped = width // heads, heads != kv_heads
        shared = self.head_dim * kv_heads
        self.wq, self.wo, self.gate = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.wk, self.wv = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.qknorm = QKNorm(self.head_dim, eps)

    def fusable_groups(self) -> Sequence[Sequence[nn.Linear]]:
        if self.grouped:
            return [[self.wq, self.gate], [self.wk, self.wv]]
        return [[self.wq, self.wk, self.wv, self.gate]]

    def forward(
        self,
        x_BSD: Tensor,
        seen_B: Tensor | None,
        turns: tuple[Tensor, Tensor] | None = None,
        residual_BSD: Tensor | None = None,
    ) -> Tensor:
        """Returns the tokens after attention, gate and projection.

        Args:
            turns: cosine and sine (S, 1, E) of their rotary angles; None: they have no places.
            residual_BSD: is added to the result, if given.
        """
        B, S, D = x_BSD.shape
        *qkv, gate = nn.grouped_linear([self.wq, self.wk, self.wv, self.gate], x_BSD)
        q, k, v = (part.reshape(B, S, -1, self.head_dim) for part in qkv)
        q, k = _placed(self.qknorm.qnorm, q, turns), _placed(self.qknorm.knorm, k, turns)
        heads = (part.transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, enable_gqa=self.grouped, key_value_seq_lengths=seen_B)
        return self.wo(rematerialize(gated, attended.transpose(1, 2).reshape(B, S, D), gate), residual_BSD)


def _placed(norm: ZeroCentredNorm, x_BSNE: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
    """Returns normalised heads, turned by the angles of their places."""
    if turns is None:
        return norm(x_BSNE)
    placed: Tensor = F.rms_norm_rope(x_BSNE, norm.weight, *turns, norm.eps)
    return placed.to(x_BSNE.dtype)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu(gate x) * up x, projected back."""

    def __init__(self, width: int, hidden: int) -> None:
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def fusable_groups(self) -> Sequence[Sequence[nn.Linear]]:
        return [[self.gate, self.up]]

    def forward(self, x_BSD: Tensor, residual_BSD: Tensor | None = None) -> Tensor:
        gate, value = nn.grouped_linear([self.gate, self.up], x_BSD)
        return self.down(rematerialize(swish_gated, gate, value), residual_BSD)


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
        """Returns one state a token (B, T, C), of those after N layers; `seen_B`, int32 (B,), tokens are looked at."""
        B, T, N, C = states_BTNC.shape
        x = states_BTNC.reshape(B * T, N, C)
        for block in self.layerwise_blocks:
            x = block(x, None)
        x_BTC = self.projector(x.transpose(1, 2)).reshape(B, T, C)
        for block in self.refiner_blocks:
            x_BTC = block(x_BTC, seen_B)
        return x_BTC
