"""Chroma's denoiser: Flux.1's blocks, of which one small network makes all modulations, and a mask over the text.

Attribute names are those of the published single file. The architecture was published as code only (lodestone-rock's
flow). Activations are channels-last.

Shape letters of images: B batch, H height and W width in latent pixels, C latent channels.
Shape letters of tokens: L image tokens, T text tokens, S = T + L, D model width, E width of a head, M modulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np

from flame_train.engine import Tensor, nn, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, float32
from flame_train.errors import ModelFileError
from flame_train.models.flux.blocks import (
    EPS,
    DoubleSingleArch,
    DoubleStreamBase,
    Projections,
    RMSNorm,
    SingleStreamBase,
    block_sizes,
    gelu_feed_forward,
    gelu_mlp,
    position_angles,
)
from flame_train.models.flux.transformer import PATCH, MLPEmbedder
from flame_train.networks.arch import block_count, shape_of
from flame_train.networks.block_network import BlockNetwork, Rounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import patchify, token_grid, unpatchify
from flame_train.networks.rope import RopeTables, image_axes

_TIME, _GUIDANCE, _PLACE = 16, 16, 32
_FEATURES: Final = _TIME + _GUIDANCE + _PLACE
"""What the approximator is told of each modulation: the time, a guidance of 0, and which modulation it is."""
_DOUBLE, _SINGLE, _FINAL = 12, 3, 2
"""Rows of modulation of a block of two streams, of one, and of the last layer."""
_shape: Final = partial(shape_of, "Chroma", "a Chroma transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChromaArch(DoubleSingleArch):
    """Everything that decides the network's shapes."""

    context_dim: int = 4096
    """Of T5's output."""
    hidden: int
    """The width of the approximator."""
    layers: int = 5
    """Of the approximator."""

    @classmethod
    def base(cls) -> Self:
        """Returns Chroma1 Base, HD and Flash."""
        return cls(width=3072, depth=19, single_depth=38, hidden=5120)

    @classmethod
    def tiny(cls, context_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU; fits `T5Arch.tiny`."""
        return cls(width=64, depth=2, single_depth=2, head_dim=32, context_dim=context_dim, hidden=48, layers=2)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says."""
        features = _shape(shapes, "img_in.weight")[1]
        hidden, guidance_shape = _shape(shapes, "distilled_guidance_layer.in_proj.weight")
        if guidance_shape != _FEATURES:
            raise ModelFileError(f"Chroma: expected an approximator of {_FEATURES} features, found {guidance_shape}")
        arch = cls(
            **block_sizes(_shape, shapes),
            channels=features // PATCH**2,
            hidden=hidden,
            layers=block_count(shapes, "distilled_guidance_layer.layers"),
        )
        stated.require(
            attention_head_dim=arch.head_dim,
            num_attention_heads=arch.width // arch.head_dim,
            axes_dims_rope=image_axes(arch.head_dim),
            patch_size=1,
            approximator_num_channels=_FEATURES,
        )
        return arch

    @property
    def modulations(self) -> int:
        """The rows of modulation of all blocks and of the last layer: 344 as published."""
        return _SINGLE * self.single_depth + _DOUBLE * self.depth + _FINAL


class Approximator(nn.Module):
    """Every modulation from the time: an MLP with residual layers, run for each of them (B, M, D)."""

    def __init__(self, arch: ChromaArch) -> None:
        self.in_proj = nn.Linear(_FEATURES, arch.hidden)
        self.layers = nn.ModuleList([MLPEmbedder(arch.hidden, arch.hidden) for _ in range(arch.layers)])
        self.norms = nn.ModuleList([RMSNorm(arch.hidden) for _ in range(arch.layers)])
        self.out_proj = nn.Linear(arch.hidden, arch.width)

    def forward(self, told_BMF: Tensor) -> Tensor:
        x_BMH = self.in_proj(told_BMF)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x_BMH = x_BMH + layer(F.rms_norm(x_BMH, (x_BMH.shape[-1],), nn.compute_copy(norm.scale), EPS))
        return self.out_proj(x_BMH)


class DoubleStreamBlock(DoubleStreamBase):
    """Image and text, with separate weights, in one joint attention."""

    def __init__(self, arch: ChromaArch) -> None:
        self.img_attn = Projections(arch.width, arch.head_dim)
        self.img_mlp = gelu_mlp(arch.width)
        self.txt_attn = Projections(arch.width, arch.head_dim)
        self.txt_mlp = gelu_mlp(arch.width)

    def forward(
        self,
        img_BLD: Tensor,
        txt_BTD: Tensor,
        of_img: Tensor,
        of_txt: Tensor,
        cos_S1E: Tensor,
        sin_S1E: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns the image's and the text's tokens after joint attention and each stream's own MLP.

        Args:
            of_img, of_txt: shift, scale and gate of attention and MLP of each stream, (B, 6, D).
        """
        rows = _rows(of_img), _rows(of_txt)
        return self.streams(gelu_feed_forward, img_BLD, txt_BTD, *rows, cos_S1E, sin_S1E, mask)


class SingleStreamBlock(SingleStreamBase):
    """Text and image as one sequence."""

    def __init__(self, arch: ChromaArch) -> None:
        super().__init__(arch.width, arch.head_dim)

    def forward(self, x_BSD: Tensor, rows_B3D: Tensor, cos_S1E: Tensor, sin_S1E: Tensor, mask: Tensor) -> Tensor:
        return self.stream(x_BSD, _rows(rows_B3D), cos_S1E, sin_S1E, mask)


def _rows(rows_BRD: Tensor) -> Sequence[Tensor]:
    return F.chunk(rows_BRD, rows_BRD.shape[1], dim=1)


class FinalLayer(nn.Module):
    """The way back to a token's features."""

    def __init__(self, arch: ChromaArch) -> None:
        self.linear = nn.Linear(arch.width, PATCH**2 * arch.channels)

    def forward(self, x_BLD: Tensor, rows_B2D: Tensor) -> Tensor:
        shift, scale = _rows(rows_B2D)
        return self.linear(F.layer_norm_modulate(x_BLD, scale, shift, EPS))


class Chroma(BlockNetwork):
    """Predicts the velocity of the flow in noised latents. It looks at a caption and one token of its padding."""

    rounded = Rounded(("double_blocks.*", "single_blocks.*"))

    def __init__(self, arch: ChromaArch) -> None:
        self.arch = arch
        self.rope = RopeTables(partial(position_angles, arch.head_dim))
        # for as long as the model lives: captured steps read them at their addresses
        self._places: dict[tuple[DType, str], Tensor] = {}
        self._numbers: dict[tuple[int, str], Tensor] = {}
        self.img_in = nn.Linear(PATCH**2 * arch.channels, arch.width)
        self.txt_in = nn.Linear(arch.context_dim, arch.width)
        self.distilled_guidance_layer = Approximator(arch)
        self.double_blocks = nn.ModuleList([DoubleStreamBlock(arch) for _ in range(arch.depth)])
        self.single_blocks = nn.ModuleList([SingleStreamBlock(arch) for _ in range(arch.single_depth)])
        self.final_layer = FinalLayer(arch)

    def forward(self, x_BHWC: Tensor, timesteps_B: Tensor, context_BTC: Tensor, rows_B: Tensor) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents, which like the states have the dtype of the weights.

        Args:
            timesteps_B: 1000 times the noise level, (B,), fp32.

        Raises:
            ShapeError: latents of other sizes.
        """
        _, h, w = token_grid("Chroma's transformer", x_BHWC, self.arch.channels, PATCH)
        T = context_BTC.shape[1]
        like = nn.compute_copy(self.img_in.weight)
        turns, mask = self.rope.of(T, ((h, w),), like), self._seen(rows_B, T, h * w)
        rows_BMD = self.distilled_guidance_layer(self._told(timesteps_B, x_BHWC.dtype))
        singles, img, txt, final = F.split(rows_BMD, self._kinds, dim=1)
        img_BLD, txt_BTD = self.img_in(patchify(x_BHWC, PATCH, channels_first=True)), self.txt_in(context_BTC)
        of_two = zip(F.chunk(img, self.arch.depth, dim=1), F.chunk(txt, self.arch.depth, dim=1), strict=True)
        for block, (of_img, of_txt) in zip(self.double_blocks, of_two, strict=True):
            img_BLD, txt_BTD = block(img_BLD, txt_BTD, of_img, of_txt, *turns, mask)
        x_BSD = F.cat([txt_BTD, img_BLD], dim=1)
        of_one = F.chunk(singles, self.arch.single_depth, dim=1)
        for block, of_block in zip(self.single_blocks, of_one, strict=True):
            x_BSD = block(x_BSD, of_block, *turns, mask)
        return unpatchify(self.final_layer(x_BSD[:, T:], final), (h, w), PATCH, channels_first=True)

    @property
    def _kinds(self) -> tuple[int, int, int, int]:
        """Rows of the blocks of one stream, of the image's streams, of the text's, and of the last layer."""
        two = _DOUBLE // 2 * self.arch.depth
        return _SINGLE * self.arch.single_depth, two, two, _FINAL

    def _told(self, timesteps_B: Tensor, dtype: DType) -> Tensor:
        """Returns what the approximator is told, (B, M, F). The sinusoids are computed in fp32."""
        B, M = timesteps_B.shape[0], self.arch.modulations
        t_BF = F.timestep_embedding(timesteps_B, _TIME, dtype=dtype)
        g_BF = F.timestep_embedding(timesteps_B * 0.0, _GUIDANCE, dtype=dtype)
        same = F.cat([t_BF, g_BF], dim=1).unsqueeze(1).expand(B, M, _TIME + _GUIDANCE)
        key = dtype, timesteps_B.device
        if key not in self._places:
            self._places[key] = tensor(places(M), dtype, timesteps_B.device)
        return F.cat([same, self._places[key].unsqueeze(0).expand(B, M, _PLACE)], dim=2)

    def _seen(self, rows_B: Tensor, text: int, image: int) -> Tensor:
        """Returns the mask of keys, bool (B, 1, 1, S): the first rows of the text, and the whole image."""
        B, key = rows_B.shape[0], (text, rows_B.device)
        if key not in self._numbers:
            self._numbers[key] = tensor(np.arange(text, dtype=np.float32)[None], device=rows_B.device)
        seen_BT = self._numbers[key] < rows_B.to(float32).reshape(B, 1)
        return F.pad(seen_BT, (0, image), value=True).reshape(B, 1, 1, text + image)


def places(modulations: int) -> np.ndarray[Any, Any]:
    """Returns the sinusoid of 1000 times each modulation's number, fp32 (M, 32): cosines, then sines.

    Frequencies and angles are rounded to fp32, as they were when the model was trained: at the last modulations that
    is 0.02 of a radian.
    """
    half = _PLACE // 2
    frequencies = np.exp(-np.log(np.float32(10000.0)) * np.arange(half, dtype=np.float32) / np.float32(half))
    angles = (1000 * np.arange(modulations)).astype(np.float32)[:, None] * frequencies.astype(np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
