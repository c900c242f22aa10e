"""The encoder of T5 v1.1 (arXiv 1910.10683, 2002.05202): the long text encoder of SD3 and Flux. UMT5's is Wan's.

Attribute names are those of the transformers layout (`encoder.block.0.layer.0.SelfAttention.q.weight`). The sum
that runs through all layers grows beyond what fp16 holds. It is kept in fp32 at least. With fp16 weights the terms
added to it are computed in fp32 too, so no value is clamped. Shape letters: B batch, T token positions, C channels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype, float16, float32
from flame_train.networks.arch import shape_of_encoder
from flame_train.networks.attention_mlp import attend
from flame_train.networks.block_network import Block, BlockNetwork, Rounded
from flame_train.networks.files.stated import NOTHING, Stated

MAX_DISTANCE: Final = 128  # tokens further apart than this share one bucket; in no file
EPS: Final = 1e-6

_BLOCK: Final = "encoder.block.0.layer"
_BIAS: Final = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
_shape: Final = partial(shape_of_encoder, "the encoder of a T5 v1.1")


@dataclass(frozen=True, slots=True)
class T5Arch:
    """The encoder's shapes. The heads together may be wider than the sequence, or narrower."""

    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    buckets: int
    own_biases: bool = False
    """Whether each block has a table of position biases, as in UMT5; else all use the first one's."""

    @classmethod
    def xxl(cls) -> Self:
        """Returns T5-XXL v1.1's encoder, 4.7 billion parameters."""
        return cls(4096, 24, 64, 64, 10240, 32128, 32)

    @classmethod
    def umt5_xxl(cls) -> Self:
        """Returns UMT5-XXL's encoder (arXiv 2304.09151), 5.7 billion parameters."""
        return cls(4096, 24, 64, 64, 10240, 256384, 32, own_biases=True)

    @classmethod
    def tiny(cls, vocabulary: int = 384, width: int = 32, own_biases: bool = False) -> Self:
        """Returns the same structure, small enough for a CPU."""
        return cls(width, 2, 4, 8, 2 * width, vocabulary, 32, own_biases)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Returns the architecture of a file's encoder, from its native names and shapes, and what its folder states.

        Raises ModelFileError for what is stated otherwise, and naming a missing tensor, as in a T5 of version
        1.0, which has no gate.
        """
        vocabulary, width = _shape(shapes, "shared.weight", 2)
        buckets, heads = _shape(shapes, _BIAS.format(0), 2)
        stated.require(
            num_heads=heads,
            feed_forward_proj="gated-gelu",
            relative_attention_max_distance=MAX_DISTANCE,
            layer_norm_epsilon=EPS,
        )
        layers = {int(match[1]) for name in shapes if (match := re.match(r"encoder\.block\.(\d+)\.", name))}
        return cls(
            width=width,
            layers=len(layers),
            heads=heads,
            head_dim=_shape(shapes, f"{_BLOCK}.0.SelfAttention.q.weight", 2)[0] // heads,
            hidden=_shape(shapes, f"{_BLOCK}.1.DenseReluDense.wi_0.weight", 2)[0],
            vocabulary=vocabulary,
            buckets=buckets,
            own_biases=_BIAS.format(1) in shapes,
        )


class SelfAttention(nn.Module):
    """Attention to all positions. Scores are not scaled: training did that to the weights."""

    def __init__(self, arch: T5Arch, has_bias: bool) -> None:
        self.heads = arch.heads
        inner = arch.heads * arch.head_dim
        self.q, self.k, self.v = (nn.Linear(arch.width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, arch.width, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(arch.buckets, arch.heads)

    def forward(self, x_BTC: Tensor, bias: Tensor, residual_BTC: Tensor) -> Tensor:
        q, k, v = self.q(x_BTC), self.k(x_BTC), self.v(x_BTC)
        return self.o(_wide(attend(q, k, v, self.heads, mask=bias, scale=1.0)), residual_BTC)


class GatedFeedForward(nn.Module):
    """gelu(wi_0 x) * wi_1 x, projected back; gelu is the tanh formula."""

    def __init__(self, arch: T5Arch) -> None:
        self.wi_0, self.wi_1 = (nn.Linear(arch.width, arch.hidden, bias=False) for _ in range(2))
        self.wo = nn.Linear(arch.hidden, arch.width, bias=False)

    def forward(self, x_BTC: Tensor, residual_BTC: Tensor) -> Tensor:
        gate, value = _wide(self.wi_0(x_BTC)), _wide(self.wi_1(x_BTC))
        return self.wo(F.gelu(gate, approximate="tanh") * value, residual_BTC)


def _wide(x: Tensor) -> Tensor:
    """Returns fp16 as fp32: T5-XXL's products are beyond 65504 in places. bf16 has fp32's range."""
    return x.to(float32) if x.dtype == float16 else x


class AttentionLayer(nn.Module):
    """Attention behind a norm and around a residual."""

    def __init__(self, arch: T5Arch, has_bias: bool) -> None:
        self.SelfAttention = SelfAttention(arch, has_bias)
        self.layer_norm = nn.RMSNorm(arch.width, EPS)

    def forward(self, h_BTC: Tensor, bias: Tensor) -> Tensor:
        return self.SelfAttention(_normed(self.layer_norm, h_BTC), bias, h_BTC)


class FeedForwardLayer(nn.Module):
    """The gated network behind a norm and around a residual."""

    def __init__(self, arch: T5Arch) -> None:
        self.DenseReluDense = GatedFeedForward(arch)
        self.layer_norm = nn.RMSNorm(arch.width, EPS)

    def forward(self, h_BTC: Tensor) -> Tensor:
        return self.DenseReluDense(_normed(self.layer_norm, h_BTC), h_BTC)


def _normed(norm: nn.RMSNorm, h_BTC: Tensor) -> Tensor:
    """Normalises in the residual's precision, then in the weights'."""
    normed: Tensor = norm(h_BTC)
    return normed.to(nn.compute_copy(norm.weight).dtype)


class Layers(Block):
    """Attention, then the gated network."""

    has_feed_forward = False

    def __init__(self, arch: T5Arch, has_bias: bool) -> None:
        self.layer = nn.ModuleList([AttentionLayer(arch, has_bias), FeedForwardLayer(arch)])

    def forward(self, h_BTC: Tensor, bias: Tensor) -> Tensor:
        return self.layer[1](self.layer[0](h_BTC, bias))


class Stack(nn.Module):
    """The blocks in their order. Those without a table of position biases use the one before them."""

    def __init__(self, arch: T5Arch) -> None:
        self.block = nn.ModuleList([Layers(arch, arch.own_biases or i == 0) for i in range(arch.layers)])
        self.final_layer_norm = nn.RMSNorm(arch.width, EPS)
        self.own_biases = arch.own_biases
        self.buckets: dict[int, Tensor] = {}  # by length: a captured call cannot bring them from the host

    @property
    def tables(self) -> list[nn.Embedding]:
        """The tables of position biases: the first block's, or one of each block."""
        blocks = self.block if self.own_biases else [self.block[0]]
        return [block.layer[0].SelfAttention.relative_attention_bias for block in blocks]

    def bias(self, table: nn.Embedding, length: int) -> Tensor:
        """Returns the bias of the scores of `length` positions, (1, heads, T, T)."""
        if length not in self.buckets:
            buckets = position_buckets(length, table.weight.shape[0])
            self.buckets[length] = tensor(buckets, device=table.weight.device)
        return table(self.buckets[length]).permute(2, 0, 1).unsqueeze(0).clone()


class T5Encoder(BlockNetwork):
    """Token ids to the last hidden state, normalised."""

    rounded = Rounded(("encoder.block.*",))

    def __init__(self, arch: T5Arch) -> None:
        self.arch = arch
        self.shared = nn.Embedding(arch.vocabulary, arch.width)
        self.encoder = Stack(arch)

    def run_outside(self) -> list[nn.Module]:
        """Returns the tables of position biases, which are read before a block runs."""
        return list(self.encoder.tables)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Returns (B, T, C) in the weights' dtype. `mask_BT` is True where there is a token to look at.

        Without one, attention includes padding, as SD3 and Flux were trained and as their pipelines sample.
        """
        h_BTC = self.shared(ids_BT)
        h_BTC = h_BTC.to(compute_dtype(h_BTC.dtype))
        tables = self.encoder.tables
        for i, block in enumerate(self.encoder.block):
            if i < len(tables):
                bias = self._bias(tables[i], ids_BT.shape[1], mask_BT)
            h_BTC = block(h_BTC, bias)
        return _normed(self.encoder.final_layer_norm, h_BTC)

    def _bias(self, table: nn.Embedding, length: int, mask_BT: Tensor | None) -> Tensor:
        """Returns the bias of the scores, (1, heads, T, T), or (B, heads, T, T) that hides what is masked."""
        bias = self.encoder.bias(table, length)
        if mask_BT is None:
            return bias
        hidden_B11T = F.logical_not(mask_BT).reshape(mask_BT.shape[0], 1, 1, -1)
        return bias.expand(mask_BT.shape[0], -1, -1, -1).masked_fill(hidden_B11T, -math.inf)


def position_buckets(length: int, buckets: int) -> np.ndarray[Any, Any]:
    """Returns the bucket of each query's distance to each key, int32 (T, T): keys after the query in the upper half.

    In each half the near distances have one bucket each, those up to MAX_DISTANCE buckets of logarithmic width. The
    logarithm is taken in fp32, in the reference's order of operations, so that no distance lands one bucket off.
    """
    half = buckets // 2
    exact = half // 2
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    away = np.abs(distance)
    ratio = np.maximum(away, exact).astype(np.float32) / np.float32(exact)
    steps = np.log(ratio) / np.float32(math.log(MAX_DISTANCE / exact)) * np.float32(half - exact)
    far = np.minimum(exact + steps.astype(np.int64), half - 1)
    return (np.where(away < exact, away, far) + half * (distance > 0)).astype(np.int32)
