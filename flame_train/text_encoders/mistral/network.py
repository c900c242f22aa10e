"""The decoder of Mistral Small 3 as a text encoder: states after three of its layers, and that of padding.

It is Qwen3's without norms of queries and keys. Attribute names are those of transformers. Shape letters: B batch, T
token positions, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype
from flame_train.errors import ModelFileError
from flame_train.networks.arch import shape_of_encoder
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.text_encoders.qwen3.network import Layer, Qwen3Arch, rotary_angles
from flame_train.text_encoders.qwen3.vision_parts import normed

_LAYER: Final = "layers.0"
_shape: Final = partial(shape_of_encoder, "a Mistral Small")
TAPS: Final = (10, 20, 30)
"""After so many layers states are taken. Those behind the last play no part."""
_TOKENS: Final = 8192  # that go through a layer at once


@dataclass(frozen=True, slots=True)
class MistralArch(Qwen3Arch):
    """The decoder's shapes."""

    vocabulary: int = 131072
    theta: float = 1e9
    eps: float = 1e-5
    norms: bool = False

    @classmethod
    def small_3(cls) -> Self:
        """Returns what is used of Mistral Small 3, 3.1 and 3.2."""
        return cls(5120, TAPS[-1], 32, 8, 32768)

    @classmethod
    def tiny(cls, vocabulary: int = 1256, width: int = 32, layers: int = TAPS[-1]) -> Self:
        """Returns the same structure, small enough for a CPU; no shape tells the size of a head."""
        return cls(width, layers, 2, 1, 2 * width, vocabulary)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING, theta: float = 1e9) -> Self:
        """Returns the architecture of a file's decoder, as that of Qwen3 does."""
        stated = stated.within("text_config") if "text_config" in stated.values else stated
        vocabulary, width = _shape(shapes, "embed_tokens.weight", 2)
        layers = len({match[1] for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))})
        if layers != TAPS[-1]:
            raise ModelFileError(
                f"text encoder: expected a Mistral Small with {TAPS[-1]} layers or more, found {layers}; get the whole"
            )
        head_dim = int(stated.number("head_dim", 128))
        rotary = stated.within("rope_parameters")
        rotary.require(rope_type="default")
        arch = cls(
            width=width,
            layers=layers,
            heads=_shape(shapes, f"{_LAYER}.self_attn.q_proj.weight", 2)[0] // head_dim,
            kv_heads=_shape(shapes, f"{_LAYER}.self_attn.k_proj.weight", 2)[0] // head_dim,
            hidden=_shape(shapes, f"{_LAYER}.mlp.gate_proj.weight", 2)[0],
            vocabulary=vocabulary,
            head_dim=head_dim,
            theta=rotary.number("rope_theta", stated.number("rope_theta", theta)),
            eps=stated.number("rms_norm_eps", 1e-5),
        )
        stated.require(
            num_attention_heads=arch.heads,
            num_key_value_heads=arch.kv_heads,
            hidden_act="silu",
            sliding_window=None,
            rope_scaling=None,
        )
        return arch


class MistralLayer(Layer):
    """A layer whose padding finds nothing: its state goes through the MLP alone."""

    def forward(self, h_BTC: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, own_BT1: Tensor | None) -> Tensor:
        """Returns the states after the layer. `own_BT1` is True for tokens, which stand before all padding."""
        found_BTC = self.self_attn(normed(self.input_layernorm, h_BTC), (cos_T1E, sin_T1E), None, h_BTC)
        h_BTC = F.where(own_BT1, found_BTC, h_BTC)
        return self.mlp(normed(self.post_attention_layernorm, h_BTC), h_BTC)


class Mistral(BlockNetwork):
    """Token ids to hidden states. All captions go through a layer before the next is needed."""

    def __init__(self, arch: MistralArch) -> None:
        self.arch = arch
        self.embed_tokens = nn.Embedding(arch.vocabulary, arch.width)
        self.layers = nn.ModuleList([MistralLayer(arch) for _ in range(arch.layers)])
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}  # by length: they stay for as long as the network

    def forward(self, ids_BT: Tensor, own_BT: Tensor) -> Tensor:
        """Returns the states (B, T, 3 C) after the layers of `TAPS` side by side, in the weights' dtype.

        Args:
            ids_BT: tokens, then padding.
            own_BT: True where there is a token.
        """
        (B, T), h_BTC = ids_BT.shape, self.embed_tokens(ids_BT)
        weights, h_BTC = h_BTC.dtype, h_BTC.to(compute_dtype(h_BTC.dtype))
        turns, own_BT1 = self._turn(T), own_BT.unsqueeze(-1)
        size = max(1, _TOKENS // T)
        states, parts = list[Tensor](), [slice(i, i + size) for i in range(0, B, size)]
        for i, layer in enumerate(self.layers, start=1):
            made = [layer(h_BTC[part], *turns, own_BT1[part]) for part in parts]
            h_BTC = made[0] if len(made) == 1 else F.cat(made, dim=0)
            if i in TAPS:
                states.append(h_BTC.to(weights))
        return F.cat(states, dim=-1)

    def _turn(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the rotary angles, (T, 1, E), in fp32 at least."""
        if length not in self._turns:
            like = self.embed_tokens.weight
            angles, dtype = (
                rotary_angles(length, self.arch.head_dim, self.arch.theta)[:, None],
                compute_dtype(like.dtype),
            )
            self._turns[length] = tensor(np.cos(angles), dtype, like.device), tensor(np.sin(angles), dtype, like.device)
        return self._turns[length]
