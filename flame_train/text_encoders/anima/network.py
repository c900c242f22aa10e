"""Anima's text: T5's token ids attend to Qwen3's hidden states, six blocks long, in place of T5's encoder.

The network that does it is called `llm_adapter` in the published single file, and has its names here. Shape letters: B
batch, S tokens of Qwen3, T tokens of T5, C channels, N heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype
from flame_train.errors import ModelFileError
from flame_train.networks.arch import block_count
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.text_encoders.qwen3.network import Qwen3, rotary_angles

_EPS: Final = 1e-6
_THETA: Final = 10000.0

Turns = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles of tokens in a row, (T, 1, E)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterArch:
    """The adapter's shapes."""

    width: int = 1024
    layers: int = 6
    head_dim: int = 64
    hidden: int = 4096
    source_dim: int = 1024
    """Of Qwen3's states."""
    target_dim: int = 1024
    """Of the text that the denoiser attends to, and of the tokens' embedding."""
    vocabulary: int = 32128
    least: int = 512
    """The tokens of the shortest text: zeros fill it up, and are attended to."""

    @classmethod
    def tiny(cls, width: int = 32) -> Self:
        """Returns the same structure, small enough for a CPU, with T5's whole vocabulary."""
        return cls(width=width, layers=2, head_dim=16, hidden=2 * width, source_dim=width, target_dim=width)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Returns the architecture of a file's adapter, from its native names and shapes, and what its folder states.

        Raises ModelFileError naming a missing tensor, or what is stated otherwise.
        """
        first = "blocks.0"
        vocabulary, target = _shape(shapes, "embed.weight")
        (head_dim,) = _shape(shapes, f"{first}.cross_attn.q_norm.weight")
        width, source = _shape(shapes, f"{first}.cross_attn.k_proj.weight")
        arch = cls(
            width=width,
            layers=block_count(shapes, "blocks"),
            head_dim=head_dim,
            hidden=_shape(shapes, f"{first}.mlp.0.weight")[0],
            source_dim=source,
            target_dim=target,
            vocabulary=vocabulary,
            least=int(stated.number("min_sequence_length", 512)),
        )
        stated.require(
            num_attention_heads=width // head_dim,
            mlp_ratio=arch.hidden / width,
            use_self_attention=True,
            use_layer_norm=False,
        )
        return arch


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise ModelFileError(f"Anima: expected a tensor llm_adapter.{name}, which is missing: this is not its adapter")
    return shapes[name]


class Attention(nn.Module):
    """Attention of tokens to their own, or to others', with normalised queries and keys turned by their places."""

    def __init__(self, arch: AdapterArch, context_dim: int) -> None:
        self.head_dim = arch.head_dim
        self.q_proj = nn.Linear(arch.width, arch.width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(context_dim, arch.width, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(arch.width, arch.width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(arch.head_dim, _EPS) for _ in range(2))

    def forward(self, x_BTC: Tensor, context: Tensor, own: Turns, others: Turns, mask: Tensor) -> Tensor:
        projected = self.q_proj(x_BTC), self.k_proj(context), self.v_proj(context)
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in projected)
        q, k = _turned(q, self.q_norm, own), _turned(k, self.k_norm, others)
        attended = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask)
        return self.o_proj(attended.transpose(1, 2).reshape(*x_BTC.shape[:2], -1))


def _turned(x_BTNE: Tensor, norm: nn.RMSNorm, turns: Turns) -> Tensor:
    return F.rms_norm_rope(x_BTNE, nn.compute_copy(norm.weight), *turns, _EPS, interleaved=False)


class AdapterBlock(nn.Module):
    """Self attention, attention to Qwen3's states and an MLP, each behind a norm and around a residual."""

    def __init__(self, arch: AdapterArch) -> None:
        self.norm_self_attn, self.norm_cross_attn, self.norm_mlp = (nn.RMSNorm(arch.width, _EPS) for _ in range(3))
        self.self_attn, self.cross_attn = Attention(arch, arch.width), Attention(arch, arch.source_dim)
        self.mlp = nn.ModuleList([nn.Linear(arch.width, arch.hidden), None, nn.Linear(arch.hidden, arch.width)])

    def forward(
        self, x_BTC: Tensor, states_BSC: Tensor, own: Turns, others: Turns, seen: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Returns the tokens after the block.

        Args:
            x_BTC: T5's tokens.
            states_BSC: Qwen3's states.
            own, others: the angles of both.
            seen: which of both are attended to, bool (B, 1, 1, T) and (B, 1, 1, S).
        """
        normed = self.norm_self_attn(x_BTC)
        x_BTC = x_BTC + self.self_attn(normed, normed, own, own, seen[0])
        x_BTC = x_BTC + self.cross_attn(self.norm_cross_attn(x_BTC), states_BSC, own, others, seen[1])
        return x_BTC + self.mlp[2](F.gelu(self.mlp[0](self.norm_mlp(x_BTC))))


class LlmAdapter(nn.Module):
    """Qwen3's states and T5's token ids to the text that the denoiser attends to."""

    def __init__(self, arch: AdapterArch) -> None:
        self.arch = arch
        self.embed = nn.Embedding(arch.vocabulary, arch.target_dim)
        self.has_in_proj = arch.width != arch.target_dim
        if self.has_in_proj:
            self.in_proj = nn.Linear(arch.target_dim, arch.width)
        self.blocks = nn.ModuleList([AdapterBlock(arch) for _ in range(arch.layers)])
        self.out_proj = nn.Linear(arch.width, arch.target_dim)
        self.norm = nn.RMSNorm(arch.target_dim, _EPS)
        self._turns: dict[int, Turns] = {}  # by length: a captured call cannot bring them from the host

    def forward(self, states_BSC: Tensor, ids_BT: Tensor, own_BS: Tensor, own_BT: Tensor) -> Tensor:
        """Returns the text (B, max(T, least), target_dim); zeros behind a caption's own tokens.

        Args:
            states_BSC: Qwen3's hidden states.
            ids_BT: T5's token ids.
            own_BS, own_BT: True for a caption's own tokens of Qwen3, and of T5.
        """
        x_BTC = self.embed(ids_BT)
        x_BTC = self.in_proj(x_BTC) if self.has_in_proj else x_BTC
        own, others = self._turn(ids_BT.shape[1]), self._turn(states_BSC.shape[1])
        seen = tuple(mask.reshape(mask.shape[0], 1, 1, -1) for mask in (own_BT, own_BS))
        for block in self.blocks:
            x_BTC = block(x_BTC, states_BSC, own, others, seen)
        text_BTC = self.norm(self.out_proj(x_BTC)).masked_fill(F.logical_not(own_BT).unsqueeze(-1), 0.0)
        return F.pad(text_BTC, (0, 0, 0, max(0, self.arch.least - ids_BT.shape[1])))

    def _turn(self, length: int) -> Turns:
        if length not in self._turns:
            like = self.embed.weight
            angles, dtype = rotary_angles(length, self.arch.head_dim, _THETA)[:, None], compute_dtype(like.dtype)
            self._turns[length] = tensor(np.cos(angles), dtype, like.device), tensor(np.sin(angles), dtype, like.device)
        return self._turns[length]


class AnimaText(BlockNetwork):
    """Both networks of the text: a caption's tokens to what the denoiser attends to."""

    def __init__(self, qwen3: Qwen3, llm_adapter: LlmAdapter) -> None:
        self.qwen3, self.llm_adapter = qwen3, llm_adapter

    def forward(self, ids_BS: Tensor, own_BS: Tensor, t5_ids_BT: Tensor, t5_own_BT: Tensor) -> Tensor:
        """Returns the text; see `LlmAdapter.forward`.

        Qwen3's tokens look back alone, so that its padding is not masked.
        """
        (states_BSC,) = self.qwen3(ids_BS)
        return self.llm_adapter(states_BSC, t5_ids_BT, own_BS, t5_own_BT)
