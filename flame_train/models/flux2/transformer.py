"""FLUX.2's denoiser: Flux.1's two kinds of blocks, with gated MLPs and one modulation for all blocks of a kind.

Attribute names are those of the published single file. The architecture was published as code only. Activations are
channels-last. A token is one pixel of the patched latents. No layer has a bias.

Shape letters of images: B batch, H height and W width in latent pixels, C channels of a pixel.
Shape letters of tokens: L image tokens, T text tokens, S = T + L, D model width, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np

from flame_train.engine import Tensor, nn, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType
from flame_train.models.flux.blocks import (
    DoubleSingleArch,
    DoubleStreamBase,
    QKNorm,
    Stream,
    attend,
    block_sizes,
)
from flame_train.networks.arch import shape_of
from flame_train.networks.block_network import Block, BlockNetwork, Rounded, bounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import token_grid
from flame_train.networks.modulation import modulated
from flame_train.networks.rope import Angles, Grids, RopeTables, grid, rope_angles

FREQUENCIES: Final = 256
"""The width of the sinusoid of times."""
_THETA: Final = 2000.0
_APART: Final = 10  # control images stand at 10, 20, ... on the axis of images
_EPS: Final = 1e-6
_shape: Final = partial(shape_of, "FLUX.2", "a FLUX.2 transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flux2Arch(DoubleSingleArch):
    """Everything that decides the network's shapes."""

    mlp: int
    """The width of the gated MLPs."""
    channels: int = 128
    """Of the patched latents."""
    context_dim: int
    """Of the text encoder's output."""
    guidance: bool = False
    """Whether it is told a guidance scale: dev was distilled with one."""

    @classmethod
    def dev(cls) -> Self:
        """Returns FLUX.2 dev."""
        return cls(width=6144, depth=8, single_depth=48, mlp=18432, context_dim=15360, guidance=True)

    @classmethod
    def klein_4b(cls) -> Self:
        """Returns FLUX.2 klein 4B, base and distilled."""
        return cls(width=3072, depth=5, single_depth=20, mlp=9216, context_dim=7680)

    @classmethod
    def klein_9b(cls) -> Self:
        """Returns FLUX.2 klein 9B, base and distilled."""
        return cls(width=4096, depth=8, single_depth=24, mlp=12288, context_dim=12288)

    @classmethod
    def tiny(cls, context_dim: int = 96, guidance: bool = False) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        sizes = {"width": 64, "depth": 2, "single_depth": 2, "head_dim": 32, "mlp": 192, "context_dim": context_dim}
        return cls(**sizes, guidance=guidance)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says."""
        arch = cls(
            **block_sizes(_shape, shapes),
            mlp=_shape(shapes, "double_blocks.0.img_mlp.2.weight")[1],
            channels=_shape(shapes, "img_in.weight")[1],
            guidance="guidance_in.in_layer.weight" in shapes,
        )
        stated.require(
            attention_head_dim=arch.head_dim,
            num_attention_heads=arch.width // arch.head_dim,
            axes_dims_rope=arch.axes,
            rope_theta=_THETA,
            eps=_EPS,
            patch_size=1,
            guidance_embeds=arch.guidance,
            timestep_guidance_channels=FREQUENCIES,
        )
        return arch

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """How many values of a head encode image (0; control images 10, 20, ...), row, column and place in the text."""
        each = self.head_dim // 4
        return each, each, each, each


def position_angles(arch: Flux2Arch, text: int, grids: Grids) -> Angles:
    """Returns the angle by which each value of a head is rotated at each token, fp64 (S, E)."""
    images = np.concatenate([grid(*size, image=_APART * number) for number, size in enumerate(grids)])
    ids = np.zeros((text + len(images), 4))
    ids[:text, 3] = np.arange(text)
    ids[text:, :3] = images
    return rope_angles(ids, arch.axes, _THETA)


class MLPEmbedder(nn.Module):
    """A sinusoid, of a time or a guidance scale, to the model's width: linear, silu, linear."""

    def __init__(self, width: int) -> None:
        self.in_layer = nn.Linear(FREQUENCIES, width, bias=False)
        self.out_layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class Modulation(nn.Module):
    """(shift, scale, gate) for each part of the blocks of a kind, (B, 1, D) each, from the time's vector."""

    def __init__(self, width: int, parts: int) -> None:
        self.rows = 3 * parts
        self.lin = nn.Linear(width, self.rows * width, bias=False)

    def forward(self, silu_vec_BD: Tensor) -> tuple[Tensor, ...]:
        return F.chunk(self.lin(silu_vec_BD).unsqueeze(1), self.rows, dim=-1)


class Projections(nn.Module):
    """One stream's way into the joint attention and out of it."""

    def __init__(self, arch: Flux2Arch) -> None:
        self.qkv = nn.Linear(arch.width, 3 * arch.width, bias=False)
        self.norm = QKNorm(arch.head_dim)
        self.proj = nn.Linear(arch.width, arch.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Stream:
        return self.norm, F.chunk(self.qkv(x_BLD), 3, dim=-1)


def _mlp(arch: Flux2Arch) -> nn.ModuleList:
    """Returns the layers linear, SwiGLU, linear; entry 1 is the activation, which holds no weights."""
    first, second = nn.Linear(arch.width, 2 * arch.mlp, bias=False), nn.Linear(arch.mlp, arch.width, bias=False)
    return nn.ModuleList([first, None, second])


# The inputs of linear layers are rematerialized: their own inputs have the same size and are saved anyway.


def gated(x: Tensor) -> Tensor:
    """silu(gate) * value of [gate, value] (arXiv 2002.05202)."""
    gate, value = F.chunk(x, 2, dim=-1)
    return F.silu(gate) * value


def _beside(found_BSD: Tensor, hidden_BSF: Tensor) -> Tensor:
    return F.cat([found_BSD, gated(hidden_BSF)], dim=-1)


def _feed_forward(mlp: nn.ModuleList, x_BLD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    fed = mlp[2](rematerialize(gated, mlp[0](modulated(x_BLD, shift, scale))))
    return F.gated_add(x_BLD, gate, fed)


class DoubleStreamBlock(DoubleStreamBase):
    """Image and text, with separate weights, in one joint attention."""

    def __init__(self, arch: Flux2Arch) -> None:
        self.img_attn, self.txt_attn = Projections(arch), Projections(arch)
        self.img_mlp, self.txt_mlp = _mlp(arch), _mlp(arch)

    def forward(
        self, img_BLD: Tensor, txt_BTD: Tensor, cos_S1E: Tensor, sin_S1E: Tensor, *modulation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the image's and the text's tokens after joint attention and each stream's own MLP.

        Args:
            modulation: shift, scale and gate (B, 1, D) of attention and MLP, of the image and then of the text.
        """
        return self.streams(_feed_forward, img_BLD, txt_BTD, modulation[:6], modulation[6:], cos_S1E, sin_S1E)


class SingleStreamBlock(Block):
    """Text and image as one sequence; attention and MLP side by side, each a part of two wide layers."""

    has_feed_forward = False  # its MLP begins in one layer with the attention: there is nothing to gain by it alone

    def __init__(self, arch: Flux2Arch) -> None:
        self.parts = (arch.width, arch.width, arch.width, 2 * arch.mlp)
        self.linear1 = nn.Linear(arch.width, sum(self.parts), bias=False)
        self.linear2 = nn.Linear(arch.width + arch.mlp, arch.width, bias=False)
        self.norm = QKNorm(arch.head_dim)

    def forward(
        self, x_BSD: Tensor, cos_S1E: Tensor, sin_S1E: Tensor, shift: Tensor, scale: Tensor, gate: Tensor
    ) -> Tensor:
        """Returns the tokens after the block.

        Args:
            shift, scale, gate: the modulation, (B, 1, D) each.
        """
        *qkv, hidden = F.split(self.linear1(modulated(x_BSD, shift, scale)), self.parts, dim=-1)
        found_BSD = attend([(self.norm, qkv)], cos_S1E, sin_S1E)
        return bounded(F.gated_add(x_BSD, gate, self.linear2(rematerialize(_beside, found_BSD, hidden))))


class FinalLayer(nn.Module):
    """Modulation, and the way back to a token's features."""

    def __init__(self, width: int, channels: int) -> None:
        self.linear = nn.Linear(width, channels, bias=False)
        self.adaLN_modulation = nn.ModuleList([None, nn.Linear(width, 2 * width, bias=False)])

    def forward(self, x_BLD: Tensor, silu_vec_BD: Tensor) -> Tensor:
        shift, scale = F.chunk(self.adaLN_modulation[1](silu_vec_BD).unsqueeze(1), 2, dim=-1)
        return self.linear(F.layer_norm_modulate(x_BLD, scale, shift, _EPS))


class Flux2(BlockNetwork):
    """Predicts the velocity of the flow in noised latents. Its blocks are those of two streams and of one."""

    rounded = Rounded(("double_blocks.*", "single_blocks.*"))

    def __init__(self, arch: Flux2Arch) -> None:
        self.arch = arch
        self.rope = RopeTables(partial(position_angles, arch))
        self.img_in = nn.Linear(arch.channels, arch.width, bias=False)
        self.txt_in = nn.Linear(arch.context_dim, arch.width, bias=False)
        self.time_in = MLPEmbedder(arch.width)
        if arch.guidance:
            self.guidance_in = MLPEmbedder(arch.width)
        self.double_stream_modulation_img = Modulation(arch.width, 2)
        self.double_stream_modulation_txt = Modulation(arch.width, 2)
        self.single_stream_modulation = Modulation(arch.width, 1)
        self.double_blocks = nn.ModuleList([DoubleStreamBlock(arch) for _ in range(arch.depth)])
        self.single_blocks = nn.ModuleList([SingleStreamBlock(arch) for _ in range(arch.single_depth)])
        self.final_layer = FinalLayer(arch.width, arch.channels)

    def forward(
        self,
        x_BHWC: Tensor,
        timesteps_B: Tensor,
        context_BTC: Tensor,
        controls: Sequence[Tensor] = (),
        guidance_B: Tensor | None = None,
    ) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents.

        Args:
            timesteps_B: 1000 times the noise level, (B,), fp32.
            context_BTC: the text encoder's hidden states (B, T, context_dim), padding included.
            guidance_B: the guidance scale (B,) that dev is told; None for klein.

        All but timesteps and guidance have the dtype of the weights.

        Raises:
            ValueError: guidance for a model without that input, or none for a model with it.
            ShapeError: latents of other sizes.
        """
        images = (x_BHWC, *controls)
        grids = tuple(token_grid("FLUX.2's transformer", image, self.arch.channels, 1)[1:] for image in images)
        (h, w), T = grids[0], context_BTC.shape[1]
        silu_vec_BD = F.silu(self._vector(timesteps_B, guidance_B, x_BHWC.dtype))
        both = (*self.double_stream_modulation_img(silu_vec_BD), *self.double_stream_modulation_txt(silu_vec_BD))
        turns = self.rope.of(T, grids, nn.compute_copy(self.img_in.weight))
        tokens = [image.flatten(1, 2) for image in images]
        img_BLD = self.img_in(F.cat(tokens, dim=1) if controls else tokens[0])
        txt_BTD = self.txt_in(context_BTC)
        for block in self.double_blocks:
            img_BLD, txt_BTD = block(img_BLD, txt_BTD, *turns, *both)
        x_BSD, one = F.cat([txt_BTD, img_BLD], dim=1), self.single_stream_modulation(silu_vec_BD)
        for block in self.single_blocks:
            x_BSD = block(x_BSD, *turns, *one)
        return self.final_layer(x_BSD[:, T : T + h * w], silu_vec_BD).reshape(x_BHWC.shape)

    def _vector(self, timesteps_B: Tensor, guidance_B: Tensor | None, dtype: DType) -> Tensor:
        """Returns the vector of time and guidance, (B, D). The sinusoids are computed in fp32."""
        if (guidance_B is not None) != self.arch.guidance:
            expected, came = ("a", "none") if self.arch.guidance else ("no", "one")
            raise ValueError(f"FLUX.2: expected {expected} guidance for this model, got {came}")
        vec_BD = self.time_in(F.timestep_embedding(timesteps_B, FREQUENCIES, dtype=dtype))
        if guidance_B is not None:
            vec_BD = vec_BD + self.guidance_in(F.timestep_embedding(guidance_B * 1000.0, FREQUENCIES, dtype=dtype))
        return vec_BD
