"""Qwen-Image 2.1's denoiser: one stream of text and images, in which no token sees what comes after it.

The image that is made comes last, and control images stand among the text. An image's tokens all see each other.
Attribute names are those of the published single file. Text and control images are modulated as at time 0, so nothing
of them depends on the noise. One modulation serves all blocks. Activations are channels-last. Shape letters: B batch, H
height and W width in latent pixels, C channels of the latents, D model width, E width of a head. There are L tokens of
the image, M of control images and T of the text, in this order, S in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flame_train.engine import Tensor, checkpoint, nn, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, compute_dtype
from flame_train.engine.nn import param
from flame_train.models.krea2.parts import swish_gated
from flame_train.models.qwenimage.arch import FREQUENCIES, NONE, Positions, QwenImageArch, Shown
from flame_train.networks.block_network import Block, BlockNetwork, Rounded, bounded
from flame_train.networks.latents import token_grid

_PARTS: Final = 4  # scale and gate, of the attention and of the gated network

# The inputs of linear layers are rematerialized: their own inputs have the same size and are saved anyway.


def _joined(*parts: Tensor) -> Tensor:
    """Returns the heads' values of all tokens side by side, (B, S, D), of parts (B, N, tokens, E)."""
    joined = F.cat([x.transpose(1, 2) for x in parts], dim=1)
    return joined.reshape(*joined.shape[:2], -1)


@dataclass(frozen=True, slots=True)
class Before:
    """What stands before the image, of which its tokens see all.

    Attributes:
        seen: how many of all tokens are no padding, int32 (B,). Padding stands last.
        shown: the control images.
        seen_by_text: at which control images' and texts' tokens those of the text may look; None without images.
    """

    seen: Tensor
    shown: Shown = NONE
    seen_by_text: Tensor | None = None


class ZeroCentredNorm(nn.Module):
    """rms_norm(x) * (1 + weight) over the last dim; 1 + weight is never rounded to 16 bits."""

    weight: Tensor

    def __init__(self, dim: int, eps: float) -> None:
        self.dim, self.eps = dim, eps
        self.weight = param(dim, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = nn.compute_copy(self.weight)
        normed: Tensor = F.rms_norm(x, (self.dim,), own.to(compute_dtype(own.dtype)) + 1.0, self.eps)
        return normed.to(x.dtype)


class TextProjection(nn.Module):
    """The text encoder's states in the model's width: norm, linear, gelu, linear."""

    def __init__(self, arch: QwenImageArch) -> None:
        self.text_norm = ZeroCentredNorm(arch.text_dim, arch.eps)
        self.in_layer = nn.Linear(arch.text_dim, arch.width, bias=False)
        self.out_layer = nn.Linear(arch.width, arch.width, bias=False)

    def forward(self, states_BTF: Tensor) -> Tensor:
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(states_BTF)), approximate="tanh"))


class TimestepEmbedder(nn.Module):
    """A time's sinusoid to the vector that modulates: linear, silu, linear."""

    def __init__(self, width: int) -> None:
        self.linear_1 = nn.Linear(FREQUENCIES, width, bias=False)
        self.linear_2 = nn.Linear(width, width, bias=False)

    def forward(self, times_N: Tensor, dtype: DType) -> Tensor:
        sinusoid = F.timestep_embedding(times_N * 1000.0, FREQUENCIES, dtype=dtype)
        return self.linear_2(F.silu(self.linear_1(sinusoid)))


class TimeEmbedding(nn.Module):
    """The published name of what stands around the embedder."""

    def __init__(self, width: int) -> None:
        self.timestep_embedder = TimestepEmbedder(width)


class Attention(nn.Module):
    """The image attends to all; a control image to itself and what is before it; text to what is before it."""

    def __init__(self, arch: QwenImageArch) -> None:
        self.head_dim, self.eps = arch.head_dim, arch.eps
        self.to_q, self.to_k, self.to_v = (nn.Linear(arch.width, arch.width, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(arch.width, arch.width, bias=False)])
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.head_dim, arch.eps) for _ in range(2))

    def forward(self, x_BSD: Tensor, cos_BS1E: Tensor, sin_BS1E: Tensor, L: int, before: Before) -> Tensor:
        B, S, _ = x_BSD.shape
        projected = nn.grouped_linear([self.to_q, self.to_k, self.to_v], x_BSD)
        q, k, v = (part.reshape(B, S, -1, self.head_dim) for part in projected)
        q, k = (
            F.rms_norm_rope(x, nn.compute_copy(norm.weight), cos_BS1E, sin_BS1E, self.eps)
            for x, norm in ((q, self.norm_q), (k, self.norm_k))
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q_image, *q_shown, q_text = F.split(q, [L, *before.shown.sizes, S - L - sum(before.shown.sizes)], 2)
        # padding stands behind a text, so that no token of the text sees it
        mask = before.seen_by_text
        of_text = F.scaled_dot_product_attention(q_text, k[:, :, L:], v[:, :, L:], mask, is_causal=mask is None)
        of_image = F.scaled_dot_product_attention(q_image, k, v, key_value_seq_lengths=before.seen)
        of_shown = [
            F.scaled_dot_product_attention(own, *(_before(x, L, before.shown, i) for x in (k, v)))
            for i, own in enumerate(q_shown)
        ]
        return self.to_out[0](rematerialize(_joined, of_image, *of_shown, of_text))


def _before(x: Tensor, L: int, shown: Shown, i: int) -> Tensor:
    """Returns keys or values (B, N, S, E) that a control image sees: images up to itself, and the text."""
    text = L + sum(shown.sizes)
    return F.cat([x[:, :, L : L + shown.ends[i]], x[:, :, text : text + shown.starts[i]]], dim=2)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu(gate x) * up x, projected back; one matrix makes gate and value."""

    def __init__(self, arch: QwenImageArch) -> None:
        self.gate_up = nn.Linear(arch.width, 2 * arch.hidden, bias=False)
        self.out = nn.Linear(arch.hidden, arch.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.out(rematerialize(swish_gated, *F.chunk(self.gate_up(x_BSD), 2, dim=-1)))


class TransformerBlock(Block):
    """Attention and the gated network, each with a scale behind its norm, and a gate."""

    def __init__(self, arch: QwenImageArch) -> None:
        self.eps = arch.eps
        self.attn = Attention(arch)
        self.img_mlp = FeedForward(arch)

    def forward(
        self,
        x_BSD: Tensor,
        cos_BS1E: Tensor,
        sin_BS1E: Tensor,
        L: int,
        before: Before,
        scale_BSD: Tensor,
        gate_BSD: Tensor,
        feed_scale_BSD: Tensor,
        feed_gate_BSD: Tensor,
        shift_11D: Tensor,
    ) -> Tensor:
        """Returns the tokens after the block.

        Args:
            cos_BS1E, sin_BS1E: their rotary angles, (B, S, 1, E).
            L: how many are the image's.
            before: what the others are.
            scale_BSD, gate_BSD: 1 + scale multiplies a normalised token, gate what the attention makes of it.
            feed_scale_BSD, feed_gate_BSD: the same of the gated network.
            shift_11D: zeros, which the modulation adds.
        """
        scaled = rematerialize(F.layer_norm_modulate, x_BSD, scale_BSD, shift_11D, self.eps)
        attended = self.attn(scaled, cos_BS1E, sin_BS1E, L, before)
        x_BSD = F.gated_add(x_BSD, gate_BSD, attended)
        if self.checkpointing == "mlp":
            return checkpoint(self._fed, x_BSD, feed_scale_BSD, feed_gate_BSD, shift_11D)
        return self._fed(x_BSD, feed_scale_BSD, feed_gate_BSD, shift_11D)

    def _fed(self, x_BSD: Tensor, scale_BSD: Tensor, gate_BSD: Tensor, shift_11D: Tensor) -> Tensor:
        fed = self.img_mlp(rematerialize(F.layer_norm_modulate, x_BSD, scale_BSD, shift_11D, self.eps))
        return bounded(F.gated_add(x_BSD, gate_BSD, fed))


class LastNorm(nn.Module):
    """The scale of the last norm, which follows from the time."""

    def __init__(self, width: int, eps: float) -> None:
        self.eps = eps
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, time_BD: Tensor) -> Tensor:
        normed: Tensor = F.layer_norm(x_BLD, (x_BLD.shape[-1],), None, None, self.eps)
        return normed * (self.linear(F.silu(time_BD)).unsqueeze(1) + 1.0)


class QwenImage(BlockNetwork):
    """Predicts the velocity of the flow in noised latents."""

    rounded = Rounded(("transformer_blocks.*",))

    def __init__(self, arch: QwenImageArch) -> None:
        self.arch = arch
        self.positions = Positions(arch.axes, arch.theta)
        width = arch.width
        self.img_in = nn.Linear(arch.channels, width, bias=False)
        self.txt_in = TextProjection(arch)
        self.time_text_embed = TimeEmbedding(width)
        self.modulation = nn.ModuleList([None, nn.Linear(width, _PARTS * width, bias=False)])
        self.transformer_blocks = nn.ModuleList([TransformerBlock(arch) for _ in range(arch.depth)])
        self.norm_out = LastNorm(width, arch.eps)
        self.proj_out = nn.Linear(width, arch.channels, bias=False)

    def forward(
        self,
        x_BHWC: Tensor,
        times_B: Tensor,
        states_BTF: Tensor,
        rows_B: Tensor,
        controls: Sequence[Tensor] = (),
        starts: Sequence[int] = (),
    ) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents, which like the states have the dtype of the weights.

        Args:
            states_BTF: a text's states (B, T, text_dim).
            starts: how many of the text's states stand before each of them.

        Raises:
            ShapeError: latents of other sizes.
        """
        B, h, w = token_grid("Qwen-Image 2.1's transformer", x_BHWC, self.arch.channels, 1)
        T, L, shown = states_BTF.shape[1], h * w, NONE
        if controls:
            shown = Shown(tuple((x.shape[1], x.shape[2]) for x in controls), tuple(starts))
        weight = nn.compute_copy(self.img_in.weight)
        assert isinstance(weight, Tensor)
        cos_BS1E, sin_BS1E = self.positions.placed(rows_B, T, (h, w), compute_dtype(weight.dtype), shown)
        of_both = self.time_text_embed.timestep_embedder(F.cat([times_B * 0.0, times_B], dim=0), x_BHWC.dtype)
        M = sum(shown.sizes)
        modulation = self._modulation(of_both, M + T, L)
        images = [self.img_in(x.reshape(B, -1, x.shape[-1])) for x in (x_BHWC, *controls)]
        x_BSD = F.cat([*images, self.txt_in(states_BTF)], dim=1)
        mask = self.positions.seen_by_text(T, shown, x_BHWC.device) if controls else None
        before = Before(rows_B + (L + M), shown, mask)
        for block in self.transformer_blocks:
            x_BSD = block(x_BSD, cos_BS1E, sin_BS1E, L, before, *modulation)
        return self.proj_out(self.norm_out(x_BSD[:, :L], of_both[B:])).reshape(x_BHWC.shape)

    def _modulation(self, times_2BxD: Tensor, N: int, L: int) -> tuple[Tensor, ...]:
        """Returns scale, gate (B, S, D) by token, time 0 for the first N, and a zero shift for fused norms."""
        scale, gate, feed_scale, feed_gate = F.chunk(self.modulation[1](F.silu(times_2BxD)).unsqueeze(1), _PARTS, -1)
        parts = scale, F.tanh(gate), feed_scale, F.tanh(feed_gate)
        return *(_rows(part, N, L) for part in parts), (scale[:1] * 0.0).detach()


def _rows(of_both: Tensor, N: int, L: int) -> Tensor:
    """Returns a row a token (B, L + N, D), of the values at time 0 and of the image (2 B, 1, D)."""
    B, _, D = of_both.shape[0] // 2, *of_both.shape[1:]
    return F.cat([of_both[B:].expand(B, L, D), of_both[:B].expand(B, N, D)], dim=1)
