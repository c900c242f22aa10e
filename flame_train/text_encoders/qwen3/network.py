"""The decoder of Qwen3 (arXiv 2505.09388) as a text encoder: hidden states after any of its layers.

The text half of Qwen3-VL is the same network. Qwen2.5's (arXiv 2412.15115), and that of Qwen2.5-VL, has biases where
Qwen3 has norms of queries and keys. Attribute names are those of transformers below `model.`
(`layers.0.self_attn.q_proj.weight`). The sum that runs through all layers is kept in fp32 at least, as in T5. Shape
letters: B batch, T token positions, C channels, H heads, E width of a head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import compute_dtype, float16, float32
from flame_train.errors import ModelFileError
from flame_train.networks.arch import shape_of_encoder
from flame_train.networks.block_network import Block, BlockNetwork, Rounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.text_encoders.qwen3.image_tokens import Grid, ImageTokens, image_angles, interleaved_axes, positions
from flame_train.text_encoders.qwen3.vision_parts import normed

_LAYER: Final = "layers.0"
_shape: Final = partial(shape_of_encoder, "a Qwen3")
THETA: Final = 1e6
"""The base of Qwen3's rotary frequencies."""
VL_THETA: Final = 5e6
"""And of Qwen3-VL's."""
SECTIONS: Final = 24, 20, 20
"""Qwen3-VL's frequencies of a head of 128 for time, rows and columns."""
SECTIONS_2_5: Final = 16, 24, 24
"""And Qwen2.5-VL's."""


@dataclass(frozen=True, slots=True)
class Qwen3Arch:
    """The decoder's shapes; several heads of queries share one of keys and values (arXiv 2305.13245)."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 151936
    head_dim: int = 128
    theta: float = THETA
    """The base of the rotary frequencies."""
    eps: float = 1e-6
    biases: bool = False
    """Whether queries, keys and values have biases, and queries and keys no norms: Qwen2.5's."""
    norms: bool = True
    """Whether queries and keys have norms, if there are no biases. Mistral's have neither."""
    sections: tuple[int, int, int] = SECTIONS
    """How many frequencies turn by time, row and column where there are images; text does without."""

    @classmethod
    def b0_6(cls) -> Self:
        """Returns Qwen3-0.6B."""
        return cls(1024, 28, 16, 8, 3072)

    @classmethod
    def b4(cls) -> Self:
        """Returns Qwen3-4B."""
        return cls(2560, 36, 32, 8, 9728)

    @classmethod
    def vl_b4(cls) -> Self:
        """Returns the text half of Qwen3-VL-4B."""
        return replace(cls.b4(), theta=VL_THETA)

    @classmethod
    def b8(cls) -> Self:
        """Returns Qwen3-8B."""
        return cls(4096, 36, 32, 8, 12288)

    @classmethod
    def vl_b8(cls) -> Self:
        """Returns the text half of Qwen3-VL-8B."""
        return replace(cls.b8(), theta=VL_THETA)

    @classmethod
    def vl2_5_b7(cls) -> Self:
        """Returns the text half of Qwen2.5-VL-7B."""
        return cls(3584, 28, 28, 4, 18944, 152064, biases=True, sections=SECTIONS_2_5)

    @classmethod
    def tiny_2_5(cls) -> Self:
        """Returns Qwen2.5's structure, small enough for a CPU; without norms only the usual size of a head is known."""
        return cls(256, 2, 2, 1, 64, 288, biases=True, sections=SECTIONS_2_5)

    @classmethod
    def tiny(cls, vocabulary: int = 288, width: int = 32, layers: int = 3) -> Self:
        """Returns the same structure, small enough for a CPU."""
        return cls(width, layers, 4, 2, 2 * width, vocabulary, 8)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING, theta: float = THETA) -> Self:
        """Returns the architecture of a file's decoder, from its native names and shapes, and what its folder states.

        `theta` is what holds where the folder states none. Qwen3-VL states its text half as `text_config`. Its
        positions on three axes are one for text. Raises ModelFileError naming a missing tensor, or what the folder
        states and this code cannot do.
        """
        stated = stated.within("text_config") if "text_config" in stated.values else stated
        vocabulary, width = _shape(shapes, "embed_tokens.weight", 2)
        layers = {int(match[1]) for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))}
        biases = f"{_LAYER}.self_attn.q_proj.bias" in shapes
        if biases:
            head_dim = int(width // stated.number("num_attention_heads", width // 128))
        else:
            (head_dim,) = _shape(shapes, f"{_LAYER}.self_attn.q_norm.weight", 1)
        rotary = stated.within("rope_parameters")
        scaling = stated.within("rope_scaling")
        for part in (rotary, scaling):
            part.require(rope_type="default")
        arch = cls(
            width=width,
            layers=len(layers),
            heads=_shape(shapes, f"{_LAYER}.self_attn.q_proj.weight", 2)[0] // head_dim,
            kv_heads=_shape(shapes, f"{_LAYER}.self_attn.k_proj.weight", 2)[0] // head_dim,
            hidden=_shape(shapes, f"{_LAYER}.mlp.gate_proj.weight", 2)[0],
            vocabulary=vocabulary,
            head_dim=head_dim,
            theta=rotary.number("rope_theta", stated.number("rope_theta", theta)),
            eps=stated.number("rms_norm_eps", 1e-6),
            biases=biases,
            sections=_sections(scaling if "mrope_section" in scaling.values else rotary, head_dim, biases),
        )
        stated.require(
            num_attention_heads=arch.heads,
            num_key_value_heads=arch.kv_heads,
            hidden_act="silu",
            attention_bias=False,
            use_sliding_window=False,
        )
        if "mrope_section" not in scaling.values:
            stated.require(rope_scaling=None)
        return arch


def _sections(rotary: Stated, head_dim: int, in_a_row: bool) -> tuple[int, int, int]:
    """Returns the frequencies of each axis that a folder states. Raises ModelFileError unless they are three that fit.

    In a row, as Qwen2.5-VL's, they make half a head.
    """
    rotary.require(mrope_interleaved=not in_a_row)
    sections = rotary.whole_numbers("mrope_section", SECTIONS_2_5 if in_a_row else SECTIONS)
    if len(sections) != 3 or (in_a_row and "mrope_section" in rotary.values and 2 * sum(sections) != head_dim):
        halves = f" that make {head_dim // 2}" if in_a_row else ""
        raise ModelFileError(
            f"{rotary.path}: mrope_section: expected three numbers{halves}, got {list(sections)}; mend the file"
        )
    return sections


class SelfAttention(nn.Module):
    """Causal attention with normalised queries and keys, which are turned by their positions."""

    def __init__(self, arch: Qwen3Arch) -> None:
        self.head_dim, self.eps = arch.head_dim, arch.eps
        inner, shared = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.width, inner, bias=arch.biases)
        self.k_proj, self.v_proj = (nn.Linear(arch.width, shared, bias=arch.biases) for _ in range(2))
        self.o_proj = nn.Linear(inner, arch.width, bias=False)
        self.normalises = arch.norms and not arch.biases
        if self.normalises:
            self.q_norm, self.k_norm = (nn.RMSNorm(arch.head_dim, arch.eps) for _ in range(2))

    def forward(self, x_BTC: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None, residual_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = (p(x_BTC).reshape(B, T, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.normalises:
            q, k = (self._turned(x, norm, turns) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        else:
            q, k = (F.rope(x, *turns, interleaved=False).to(x.dtype) for x in (q, k))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, mask, is_causal=True, enable_gqa=True)
        return self.o_proj(_wide(attended.transpose(1, 2).reshape(B, T, -1)), residual_BTC)

    def _turned(self, x_BTHE: Tensor, norm: nn.RMSNorm, turns: tuple[Tensor, Tensor]) -> Tensor:
        return F.rms_norm_rope(x_BTHE, nn.compute_copy(norm.weight), *turns, self.eps, interleaved=False)


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu(gate x) * up x, projected back."""

    def __init__(self, arch: Qwen3Arch) -> None:
        self.gate_proj, self.up_proj = (nn.Linear(arch.width, arch.hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(arch.hidden, arch.width, bias=False)

    def forward(self, x_BTC: Tensor, residual_BTC: Tensor) -> Tensor:
        gate, value = _wide(self.gate_proj(x_BTC)), _wide(self.up_proj(x_BTC))
        return self.down_proj(F.silu(gate) * value, residual_BTC)


def _wide(x: Tensor) -> Tensor:
    """Returns fp16 as fp32: what is added to the running sum goes beyond 65504 in places. bf16 has fp32's range."""
    return x.to(float32) if x.dtype == float16 else x


class Layer(Block):
    """Attention and the gated network, each behind a norm and around a residual."""

    has_feed_forward = False

    def __init__(self, arch: Qwen3Arch) -> None:
        self.self_attn = SelfAttention(arch)
        self.mlp = Mlp(arch)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(arch.width, arch.eps) for _ in range(2))

    def forward(self, h_BTC: Tensor, cos_T1E: Tensor, sin_T1E: Tensor, mask: Tensor | None) -> Tensor:
        h_BTC = self.self_attn(normed(self.input_layernorm, h_BTC), (cos_T1E, sin_T1E), mask, h_BTC)
        return self.mlp(normed(self.post_attention_layernorm, h_BTC), h_BTC)


class Qwen3(BlockNetwork):
    """Token ids to hidden states."""

    rounded = Rounded(("layers.*",))

    def __init__(self, arch: Qwen3Arch) -> None:
        self.arch = arch
        self.embed_tokens = nn.Embedding(arch.vocabulary, arch.width)
        self.layers = nn.ModuleList([Layer(arch) for _ in range(arch.layers)])
        self.norm = nn.RMSNorm(arch.width, arch.eps)
        # by length and images: a captured call cannot bring them from the host
        self._turns: dict[tuple[int, tuple[int, ...], tuple[Grid, ...]], tuple[Tensor, Tensor]] = {}

    def forward(
        self,
        ids_BT: Tensor,
        mask_BT: Tensor | None = None,
        taps: Sequence[int] = (-1,),
        normalised: bool = True,
        padding_place: int | None = None,
        images: ImageTokens | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns the states (B, T, C) after each of some layers, in the weights' dtype; later layers do not run.

        A token attends only to itself and those before it. So padding at the end needs no mask, unless the states of
        the padding itself are used.

        Args:
            ids_BT: token ids.
            mask_BT: True where a token may be attended to; None: everywhere.
            taps: how many layers have run, as transformers' `hidden_states` are numbered: 0 is the embedding, and
                negative ones count from the end.
            normalised: whether the last layer's states are.
            padding_place: the position of all padding, for rotary angles; None: that of its place in the row.
            images: their features take their placeholders' places and, of Qwen3-VL, are added after layers.
        """
        depth = self.arch.layers
        tapped = [depth + 1 + tap if tap < 0 else tap for tap in taps]
        h_BTC = self.embed_tokens(ids_BT)
        weights, h_BTC = h_BTC.dtype, h_BTC.to(compute_dtype(h_BTC.dtype))
        turns, mask = self._turn(ids_BT.shape[1], images), None
        if mask_BT is not None:
            mask = mask_BT.reshape(mask_BT.shape[0], 1, 1, -1)
            if padding_place is not None:
                own = mask_BT.reshape(*mask_BT.shape, 1, 1)
                one = slice(padding_place, padding_place + 1)
                turns = F.where(own, turns[0], turns[0][one]), F.where(own, turns[1], turns[1][one])
        h_BTC = h_BTC if images is None else images.placed(h_BTC)
        states = {0: h_BTC}
        for i, layer in enumerate(list(self.layers)[: max(tapped)], start=1):
            h_BTC = layer(h_BTC, *turns, mask)
            if i in tapped:  # what DeepStack adds is no part of a layer's states, as in transformers
                states[i] = normed(self.norm, h_BTC) if normalised and i == depth else h_BTC
            h_BTC = h_BTC if images is None else images.added(h_BTC, i)
        return tuple(states[tap].to(weights) for tap in tapped)

    def _turn(self, length: int, images: ImageTokens | None) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the rotary angles, (T, 1, E), in fp32 at least."""
        like = self.embed_tokens.weight
        key = (length, (), ()) if images is None else (length, images.starts, images.grids)
        if key not in self._turns:
            angles = self._angles(*key)[:, None]
            dtype = compute_dtype(like.dtype)
            self._turns[key] = tensor(np.cos(angles), dtype, like.device), tensor(np.sin(angles), dtype, like.device)
        return self._turns[key]

    def _angles(self, length: int, starts: tuple[int, ...], grids: tuple[Grid, ...]) -> np.ndarray[Any, Any]:
        """Returns the rotary angles, fp64 (T, E)."""
        arch = self.arch
        if not starts:
            return rotary_angles(length, arch.head_dim, arch.theta)
        in_a_row, half = np.repeat(np.arange(3), arch.sections), arch.head_dim // 2
        axes = in_a_row if arch.biases else interleaved_axes(arch.sections, half)
        return image_angles(positions(length, starts, grids), arch.theta, axes)


def rotary_angles(length: int, head_dim: int, theta: float) -> np.ndarray[Any, Any]:
    """Each number's rotary angle at each position (arXiv 2104.09864), fp64 (T, E): pairs lie half a head apart."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.tile(np.outer(np.arange(length), frequencies), 2)
