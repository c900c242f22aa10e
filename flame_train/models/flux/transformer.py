"""Flux.1's denoiser: blocks with a stream each for image and text, then blocks with both in one stream.

Attribute names are those of the published single file. The architecture was published as code only. Its parts come
from arXiv 2403.03206 (two streams, joint attention), 2302.05442 (parallel attention and MLP) and 2104.09864 (rotary
positions). Activations are channels-last.

Shape letters of images: B batch, H height and W width in latent pixels, C latent channels.
Shape letters of tokens: L image tokens, T text tokens, S = T + L, D model width, N heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.errors import ModelFileError
from flame_train.models.flux.blocks import (
    EPS,
    DoubleSingleArch,
    DoubleStreamBase,
    Projections,
    SingleStreamBase,
    block_sizes,
    gelu_feed_forward,
    gelu_mlp,
    position_angles,
)
from flame_train.networks.arch import shape_of
from flame_train.networks.block_network import BlockNetwork, Rounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import patchify, token_grid, unpatchify
from flame_train.networks.rope import RopeTables, image_axes

PATCH: Final = 2  # the side of a token in latent pixels
_FREQUENCIES: Final = 256  # the width of the sinusoid of times and guidance
_shape: Final = partial(shape_of, "Flux", "a Flux.1 transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class FluxArch(DoubleSingleArch):
    """Everything that decides the network's shapes. schnell differs from dev in that it is not told a guidance."""

    context_dim: int = 4096
    """Of T5's output."""
    pooled_dim: int
    """Of CLIP-L's pooled output."""
    guidance: bool = True

    @classmethod
    def dev(cls) -> Self:
        """Returns Flux.1 dev, and Krea dev."""
        return cls(width=3072, depth=19, single_depth=38, head_dim=128, pooled_dim=768)

    @classmethod
    def tiny(cls, *, guidance: bool = True, context_dim: int = 32, pooled_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU; fits `T5Arch.tiny` and `ClipArch.tiny`."""
        return cls(
            width=64,
            depth=2,
            single_depth=2,
            head_dim=32,
            context_dim=context_dim,
            pooled_dim=pooled_dim,
            guidance=guidance,
        )

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says. Refuses inpainting and control variants."""
        features = _shape(shapes, "img_in.weight")[1]
        out_features = _shape(shapes, "final_layer.linear.weight")[0]
        if features != out_features:
            raise ModelFileError(
                f"Flux: expected as many features into a token as out of it, found {features} and {out_features}: "
                "this is a Fill, Canny or Depth model, which needs a second image; use Flux.1 dev or schnell"
            )
        arch = cls(
            **block_sizes(_shape, shapes),
            channels=out_features // PATCH**2,
            pooled_dim=_shape(shapes, "vector_in.in_layer.weight")[1],
            guidance="guidance_in.in_layer.weight" in shapes,
        )
        stated.require(attention_head_dim=arch.head_dim, axes_dims_rope=arch.axes, patch_size=1)
        return arch

    @property
    def axes(self) -> tuple[int, int, int]:
        """How many values of a head encode the image (0, a control image 1), the row and the column of a token."""
        return image_axes(self.head_dim)


class MLPEmbedder(nn.Module):
    """A vector to the model's width: linear, silu, linear."""

    def __init__(self, dim: int, width: int) -> None:
        self.in_layer = nn.Linear(dim, width)
        self.out_layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class Modulation(nn.Module):
    """(shift, scale, gate) for each part of a block, (B, 1, D) each, from the vector of the conditioning."""

    def __init__(self, width: int, parts: int) -> None:
        self.rows = 3 * parts
        self.lin = nn.Linear(width, self.rows * width)

    def forward(self, silu_vec_BD: Tensor) -> tuple[Tensor, ...]:
        modulation = self.lin(silu_vec_BD).reshape(silu_vec_BD.shape[0], 1, -1)
        return F.chunk(modulation, self.rows, dim=-1)


class DoubleStreamBlock(DoubleStreamBase):
    """Image and text, with separate weights, in one joint attention."""

    def __init__(self, arch: FluxArch) -> None:
        self.img_mod = Modulation(arch.width, 2)
        self.img_attn = Projections(arch.width, arch.head_dim)
        self.img_mlp = gelu_mlp(arch.width)
        self.txt_mod = Modulation(arch.width, 2)
        self.txt_attn = Projections(arch.width, arch.head_dim)
        self.txt_mlp = gelu_mlp(arch.width)

    def forward(
        self, img_BLD: Tensor, txt_BTD: Tensor, silu_vec_BD: Tensor, cos_S1E: Tensor, sin_S1E: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the image's and the text's tokens after joint attention and each stream's own MLP.

        Args:
            silu_vec_BD: SiLU of the embedding of timestep, pooled text and guidance, (B, D).
        """
        of_img, of_txt = self.img_mod(silu_vec_BD), self.txt_mod(silu_vec_BD)
        return self.streams(gelu_feed_forward, img_BLD, txt_BTD, of_img, of_txt, cos_S1E, sin_S1E)


class SingleStreamBlock(SingleStreamBase):
    """Text and image as one sequence; attention and MLP side by side, each a part of two wide layers."""

    def __init__(self, arch: FluxArch) -> None:
        super().__init__(arch.width, arch.head_dim)
        self.modulation = Modulation(arch.width, 1)

    def forward(self, x_BSD: Tensor, silu_vec_BD: Tensor, cos_S1E: Tensor, sin_S1E: Tensor) -> Tensor:
        return self.stream(x_BSD, self.modulation(silu_vec_BD), cos_S1E, sin_S1E)


class FinalLayer(nn.Module):
    """Modulation, and the way back to a token's features."""

    def __init__(self, arch: FluxArch) -> None:
        self.linear = nn.Linear(arch.width, PATCH**2 * arch.channels)
        self.adaLN_modulation = nn.ModuleList([None, nn.Linear(arch.width, 2 * arch.width)])

    def forward(self, x_BLD: Tensor, silu_vec_BD: Tensor) -> Tensor:
        modulation = self.adaLN_modulation[1](silu_vec_BD).reshape(silu_vec_BD.shape[0], 1, -1)
        shift, scale = F.chunk(modulation, 2, dim=-1)
        return self.linear(F.layer_norm_modulate(x_BLD, scale, shift, EPS))


class Flux(BlockNetwork):
    """Predicts the velocity of the flow in noised latents. Its blocks are those of two streams and of one."""

    rounded = Rounded(("double_blocks.*", "single_blocks.*"), exact=frozenset(("img_mod", "txt_mod", "modulation")))

    def __init__(self, arch: FluxArch) -> None:
        self.arch = arch
        self.rope = RopeTables(partial(position_angles, arch.head_dim))
        self.img_in = nn.Linear(PATCH**2 * arch.channels, arch.width)
        self.time_in = MLPEmbedder(_FREQUENCIES, arch.width)
        self.vector_in = MLPEmbedder(arch.pooled_dim, arch.width)
        if arch.guidance:
            self.guidance_in = MLPEmbedder(_FREQUENCIES, arch.width)
        self.txt_in = nn.Linear(arch.context_dim, arch.width)
        self.double_blocks = nn.ModuleList([DoubleStreamBlock(arch) for _ in range(arch.depth)])
        self.single_blocks = nn.ModuleList([SingleStreamBlock(arch) for _ in range(arch.single_depth)])
        self.final_layer = FinalLayer(arch)

    def forward(
        self,
        x_BHWC: Tensor,
        timesteps_B: Tensor,
        context_BTC: Tensor,
        pooled_BP: Tensor,
        guidance_B: Tensor | None = None,
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents.

        Args:
            timesteps_B: 1000 times the noise level, (B,), fp32.
            pooled_BP: CLIP-L's pooled output (B, pooled_dim).
            guidance_B: the guidance scale (B,), such as 3.5; None for a model that is not guidance-distilled.

        All but timesteps and guidance have the dtype of the weights.

        Raises:
            ValueError: guidance for a model without that input, or none for a model with it.
            ShapeError: latents of other sizes.
        """
        images = (x_BHWC, *controls)
        grids = tuple(token_grid("Flux's transformer", image, self.arch.channels, PATCH)[1:] for image in images)
        silu_vec_BD = F.silu(self._vector(timesteps_B, pooled_BP, guidance_B))
        (h, w), T = grids[0], context_BTC.shape[1]
        turns = self.rope.of(T, grids, nn.compute_copy(self.img_in.weight))
        tokens = [patchify(image, PATCH, channels_first=True) for image in images]
        img_BLD = self.img_in(F.cat(tokens, dim=1) if controls else tokens[0])
        txt_BTD = self.txt_in(context_BTC)
        for block in self.double_blocks:
            img_BLD, txt_BTD = block(img_BLD, txt_BTD, silu_vec_BD, *turns)
        x_BSD = F.cat([txt_BTD, img_BLD], dim=1)
        for block in self.single_blocks:
            x_BSD = block(x_BSD, silu_vec_BD, *turns)
        out = self.final_layer(x_BSD[:, T : T + h * w], silu_vec_BD)
        return unpatchify(out, (h, w), PATCH, channels_first=True)

    def _vector(self, timesteps_B: Tensor, pooled_BP: Tensor, guidance_B: Tensor | None) -> Tensor:
        """Returns the vector of timestep, pooled text and guidance, (B, D). The sinusoids are computed in fp32."""
        if (guidance_B is not None) != self.arch.guidance:
            expected, came = ("a", "none") if self.arch.guidance else ("no", "one")
            raise ValueError(f"Flux: expected {expected} guidance for this model, got {came}")
        t_BF = F.timestep_embedding(timesteps_B, _FREQUENCIES, dtype=pooled_BP.dtype)
        vec_BD = self.time_in(t_BF) + self.vector_in(pooled_BP)
        if guidance_B is not None:
            g_BF = F.timestep_embedding(guidance_B * 1000.0, _FREQUENCIES, dtype=pooled_BP.dtype)
            vec_BD = vec_BD + self.guidance_in(g_BF)
        return vec_BD
