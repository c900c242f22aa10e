"""The text half of CLIP (arXiv 2103.00020): OpenAI's CLIP-L, and OpenCLIP's ViT-H and bigG.

Attribute names are those of the transformers layout (`text_model.encoder.layers.0.self_attn.q_proj.weight`).
Shape letters: B batch, T token positions, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Self

from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.networks.arch import shape_of
from flame_train.networks.attention_mlp import attend
from flame_train.networks.block_network import Block, BlockNetwork
from flame_train.networks.files.stated import NOTHING, Stated

_shape: Final = partial(shape_of, "text encoder", "a CLIP text encoder")


Activation = Literal["quick_gelu", "gelu"]
_VIT_H: Final = 1024


@dataclass(frozen=True, slots=True)
class ClipArch:
    """The encoder's shapes, heads and activation."""

    width: int
    layers: int
    heads: int
    hidden: int
    activation: Activation
    projection: int | None  # width of the pooled output; None for an encoder used without one
    vocabulary: int = 49408
    positions: int = 77

    @classmethod
    def clip_l(cls) -> Self:
        """Returns OpenAI's ViT-L/14 text encoder."""
        return cls(768, 12, 12, 3072, "quick_gelu", None)

    @classmethod
    def bigg(cls) -> Self:
        """Returns OpenCLIP's ViT-bigG/14 text encoder."""
        return cls(1280, 32, 20, 5120, "gelu", 1280)

    @classmethod
    def vit_h(cls) -> Self:
        """Returns OpenCLIP's ViT-H/14 text encoder without its last layer, which Stable Diffusion 2 does not run."""
        return cls(_VIT_H, 23, 16, 4096, "gelu", None)

    @classmethod
    def tiny(cls, activation: Activation, projection: int | None = None, width: int = 32) -> Self:
        """Returns the same structure, small enough for a CPU, over the same vocabulary."""
        return cls(width, 2, _heads(width), 4 * width, activation, projection)

    @classmethod
    def from_shapes(
        cls, shapes: Mapping[str, tuple[int, ...]], activation: Activation | None = None, stated: Stated = NOTHING
    ) -> Self:
        """Returns the architecture of a file's text encoder, from its native names and shapes.

        The activation is in no file of weights: CLIP-L has "quick_gelu", bigG "gelu". Where it is not given it is what
        the folder states, else ViT-H's by its width, or CLIP-L's. Raises ModelFileError naming a missing tensor, or
        what the folder states otherwise.
        """
        vocabulary, width = _shape(shapes, "text_model.embeddings.token_embedding.weight")
        if activation is None:
            activation = "gelu" if stated.values.get("hidden_act", width == _VIT_H) in ("gelu", True) else "quick_gelu"
        stated.require(hidden_act=activation, layer_norm_eps=1e-5)
        layers = {int(m[1]) for n in shapes if (m := re.match(r"text_model\.encoder\.layers\.(\d+)\.", n))}
        return cls(
            width=width,
            layers=len(layers),
            heads=int(stated.number("num_attention_heads", _heads(width))),
            hidden=_shape(shapes, "text_model.encoder.layers.0.mlp.fc1.weight")[0],
            activation=activation,
            projection=shapes["text_projection.weight"][0] if "text_projection.weight" in shapes else None,
            vocabulary=vocabulary,
            positions=_shape(shapes, "text_model.embeddings.position_embedding.weight")[0],
        )


def _heads(width: int) -> int:
    """Heads are 64 wide, or half the width of an encoder narrower than 128, where its folder does not state them."""
    return width // min(64, width // 2)


class Embeddings(nn.Module):
    """A token's vector plus its position's."""

    def __init__(self, arch: ClipArch) -> None:
        self.token_embedding = nn.Embedding(arch.vocabulary, arch.width)
        self.position_embedding = nn.Embedding(arch.positions, arch.width)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.token_embedding(ids_BT) + nn.compute_copy(self.position_embedding.weight)[: ids_BT.shape[1]]


class SelfAttention(nn.Module):
    """Causal self attention."""

    def __init__(self, width: int, heads: int) -> None:
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = self.q_proj(x_BTC), self.k_proj(x_BTC), self.v_proj(x_BTC)
        return self.out_proj(attend(q, k, v, self.heads, is_causal=True))


class Mlp(nn.Module):
    """The two-layer network."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation = F.quick_gelu if activation == "quick_gelu" else F.gelu

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x_BTC)))


class Layer(Block):
    """Attention and network, each behind a layer norm and around a residual."""

    has_feed_forward = False

    def __init__(self, arch: ClipArch) -> None:
        self.self_attn = SelfAttention(arch.width, arch.heads)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(arch.width), nn.LayerNorm(arch.width)
        self.mlp = Mlp(arch.width, arch.hidden, arch.activation)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.layer_norm1(x_BTC))
        return x_BTC + self.mlp(self.layer_norm2(x_BTC))


class Encoder(nn.Module):
    """The layers in their order."""

    def __init__(self, arch: ClipArch) -> None:
        self.layers = nn.ModuleList([Layer(arch) for _ in range(arch.layers)])


class TextModel(nn.Module):
    """The modules that the transformers layout puts below `text_model`."""

    def __init__(self, arch: ClipArch) -> None:
        self.embeddings = Embeddings(arch)
        self.encoder = Encoder(arch)
        self.final_layer_norm = nn.LayerNorm(arch.width)


class ClipTextEncoder(BlockNetwork):
    """Token ids to the hidden state that diffusion models read and, given a projection, the pooled text."""

    def __init__(self, arch: ClipArch) -> None:
        self.arch = arch
        self.text_model = TextModel(arch)
        if arch.projection is not None:
            self.text_projection = nn.Linear(arch.width, arch.projection, bias=False)

    def forward(self, ids_BT: Tensor, eos_B: Tensor, unprojected: bool = False) -> tuple[Tensor, Tensor | None]:
        """Returns the last hidden state but one (B, T, C), not normalised, and pooled text (B, projection) or None.

        Pooled is the last hidden state, normalised, at each row's end token (`eos_B` is its position), projected.
        Without a projection it is None, and the unused last layer does not run. With `unprojected` it is the pooled
        text (B, C).
        """
        *_, last = self.text_model.encoder.layers
        h_BTC = self._before(ids_BT, 1)
        if self.arch.projection is None and not unprojected:
            return h_BTC, None
        B, C = h_BTC.shape[0], h_BTC.shape[2]
        final_BTC = self.text_model.final_layer_norm(last(h_BTC))
        at_eos = F.take_along_dim(final_BTC, eos_B.reshape(B, 1, 1).expand(B, 1, C), 1)
        pooled_BC = at_eos.reshape(B, C)
        return h_BTC, pooled_BC if self.arch.projection is None else self.text_projection(pooled_BC)

    def normalised(self, ids_BT: Tensor, skipped: int = 0) -> Tensor:
        """Returns the hidden state (B, T, C) before the last `skipped` layers, behind the final norm."""
        final_BTC: Tensor = self.text_model.final_layer_norm(self._before(ids_BT, skipped))
        return final_BTC

    def _before(self, ids_BT: Tensor, skipped: int) -> Tensor:
        """Returns the hidden state before the last `skipped` layers."""
        layers = list(self.text_model.encoder.layers)
        h_BTC: Tensor = self.text_model.embeddings(ids_BT)
        for layer in layers[: len(layers) - skipped]:
            h_BTC = layer(h_BTC)
        return h_BTC
