"""Qwen-Image 1's denoiser: image and text as two streams with weights of their own in one attention (arXiv 2508.02324).

Attribute names are those of the published files, diffusers' and ComfyUI's alike. Activations are channels-last. Shape
letters: B batch, H height and W width in latent pixels, C channels of the latents, D model width, E width of a head.
There are L image tokens and T text tokens, S = T + L in all. Tokens of control images follow those of the image and
count among the L. Where they are modulated as at time 0, runs of R tokens share a row of the modulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import float32
from flame_train.models.qwenimage.arch import FREQUENCIES
from flame_train.networks.arch import TransformerArch, block_count, shape_of
from flame_train.networks.attention_mlp import feed_forward
from flame_train.networks.block_network import Block, BlockNetwork, Rounded, bounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import patchify, token_grid, unpatchify
from flame_train.networks.modulation import gated, modulated
from flame_train.networks.rope import Angles, Grids, RopeTables, image_axes, rope_angles, stated_axes

PATCH: Final = 2  # the side of a token in latent pixels
_EPS: Final = 1e-6
_PARTS: Final = 6  # shift, scale and gate, of the attention and of the MLP
_shape: Final = partial(shape_of, "Qwen-Image 1", "a Qwen-Image 1 transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImage1Arch(TransformerArch):
    """Everything that decides the network's shapes, and the base of its rotary frequencies."""

    text_dim: int = 3584
    """Of the text encoder's states."""
    axes: tuple[int, int, int] = (16, 56, 56)
    """How many values of a head encode a token's place in the text, its row and its column."""
    theta: float = 10000.0
    zero_cond: bool | None = None
    """Whether control images are modulated as at time 0: Qwen-Image-Edit 2511's are. None: nothing beside it says."""

    @classmethod
    def base(cls, zero_cond: bool | None = None) -> Self:
        """Returns Qwen-Image of 2025-08 and 2512, and Qwen-Image-Edit."""
        return cls(width=3072, depth=60, zero_cond=zero_cond)

    @classmethod
    def tiny(cls, text_dim: int = 256, zero_cond: bool | None = None) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(width=64, depth=2, head_dim=32, text_dim=text_dim, axes=image_axes(32), zero_cond=zero_cond)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says. Refuses Layered."""
        width, features = _shape(shapes, "img_in.weight")
        (head_dim,) = _shape(shapes, "transformer_blocks.0.attn.norm_q.weight")
        arch = cls(
            width=width,
            depth=block_count(shapes, "transformer_blocks"),
            head_dim=head_dim,
            channels=features // PATCH**2,
            text_dim=_shape(shapes, "txt_in.weight")[1],
            axes=stated_axes(stated.values.get("axes_dims_rope"), head_dim, image_axes),
            zero_cond=bool(stated.values["zero_cond_t"]) if "zero_cond_t" in stated.values else None,
        )
        stated.require(
            patch_size=PATCH,
            out_channels=arch.channels,
            attention_head_dim=head_dim,
            num_attention_heads=width // head_dim,
            axes_dims_rope=arch.axes,
            guidance_embeds=False,
            use_additional_t_cond=False,
            use_layer3d_rope=False,
        )
        return arch


class Gelu(nn.Module):
    """The published name of the MLP's first layer."""

    def __init__(self, width: int) -> None:
        self.proj = nn.Linear(width, 4 * width)


class FeedForward(nn.Module):
    """linear, gelu, linear."""

    def __init__(self, width: int) -> None:
        self.net = nn.ModuleList([Gelu(width), None, nn.Linear(4 * width, width)])

    def forward(self, x_BLD: Tensor) -> Tensor:
        return feed_forward(self.net[0].proj, self.net[2], x_BLD)


class Attention(nn.Module):
    """Attention of all tokens to those that the mask lets see, with normalised queries and keys."""

    def __init__(self, arch: QwenImage1Arch) -> None:
        width, self.head_dim = arch.width, arch.head_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width)])
        self.to_add_out = nn.Linear(width, width)
        norms = (nn.RMSNorm(arch.head_dim, _EPS) for _ in range(4))
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = norms

    def forward(
        self, img_BLD: Tensor, txt_BTD: Tensor, cos_S1E: Tensor, sin_S1E: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns what image and text find, projected back, in the shapes of the inputs."""
        of_txt = nn.grouped_linear([self.add_q_proj, self.add_k_proj, self.add_v_proj], txt_BTD)
        of_img = nn.grouped_linear([self.to_q, self.to_k, self.to_v], img_BLD)
        both = [[x.reshape(*x.shape[:2], -1, self.head_dim) for x in pair] for pair in zip(of_txt, of_img, strict=True)]
        norms = (self.norm_added_q, self.norm_q), (self.norm_added_k, self.norm_k)
        q, k = (
            F.cat_rms_norm(pair, [nn.compute_copy(norm.weight) for norm in own], cos_S1E, sin_S1E, 1, _EPS)
            for pair, own in zip(both, norms, strict=False)
        )
        attended = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, F.cat(both[2], dim=1))), mask)
        found_BSD = attended.transpose(1, 2).reshape(*q.shape[:2], -1)
        for_txt, for_img = F.split(found_BSD, [txt_BTD.shape[1], img_BLD.shape[1]], dim=1)
        return self.to_out[0](for_img), self.to_add_out(for_txt)


class TransformerBlock(Block):
    """Joint attention, then an MLP for each stream; shift, scale and gate of both follow from the time."""

    def __init__(self, arch: QwenImage1Arch) -> None:
        made = (nn.ModuleList([None, nn.Linear(arch.width, _PARTS * arch.width)]) for _ in range(2))
        self.img_mod, self.txt_mod = made
        self.attn = Attention(arch)
        self.img_mlp, self.txt_mlp = (FeedForward(arch.width) for _ in range(2))

    def forward(
        self,
        img_BLD: Tensor,
        txt_BTD: Tensor,
        time_BND: Tensor,
        cos_S1E: Tensor,
        sin_S1E: Tensor,
        mask: Tensor,
        runs: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the tokens of image and text after the block.

        Args:
            time_BND: silu of the time's vector, and of that of time 0 where control images have it.
            runs: then how many runs of as many tokens the image makes, and the control images.
        """
        of_image_BND = self.img_mod[1](time_BND)
        rows = of_image_BND if runs is None else _of_runs(of_image_BND, runs)
        shift_i, scale_i, gate_i, *feed_i = F.chunk(rows, _PARTS, dim=-1)
        time_B1D = time_BND if runs is None else time_BND[:, :1]
        shift_t, scale_t, gate_t, *feed_t = F.chunk(self.txt_mod[1](time_B1D), _PARTS, dim=-1)
        img, txt = modulated(img_BLD, shift_i, scale_i), modulated(txt_BTD, shift_t, scale_t)
        found_i, found_t = self.attn(img, txt, cos_S1E, sin_S1E, mask)
        img_BLD, txt_BTD = gated(img_BLD, gate_i, found_i), gated(txt_BTD, gate_t, found_t)
        if self.checkpointing == "mlp":
            img_BLD = checkpoint(partial(_fed, self.img_mlp), img_BLD, *feed_i)
            return img_BLD, checkpoint(partial(_fed, self.txt_mlp), txt_BTD, *feed_t)
        return _fed(self.img_mlp, img_BLD, *feed_i), _fed(self.txt_mlp, txt_BTD, *feed_t)


def _fed(mlp: FeedForward, x_BLD: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    return bounded(gated(x_BLD, gate, mlp(modulated(x_BLD, shift, scale))))


def _of_runs(rows_B2F: Tensor, runs: tuple[int, int]) -> Tensor:
    """Returns a row for each run (B, N, 1, F), of that of the image's tokens and that of control images'."""
    B, _, features = rows_B2F.shape
    parts = [rows_B2F[:, i : i + 1].expand(B, count, features) for i, count in enumerate(runs)]
    return F.cat(parts, dim=1).unsqueeze(2)


class TimestepEmbedder(nn.Module):
    """A time's sinusoid to the vector that modulates: linear, silu, linear."""

    def __init__(self, width: int) -> None:
        self.linear_1, self.linear_2 = nn.Linear(FREQUENCIES, width), nn.Linear(width, width)


class TimeEmbedding(nn.Module):
    """The published name of what stands around the embedder."""

    def __init__(self, width: int) -> None:
        self.timestep_embedder = TimestepEmbedder(width)


class LastNorm(nn.Module):
    """Scale and shift of the last norm, which follow from the time."""

    def __init__(self, width: int) -> None:
        self.linear = nn.Linear(width, 2 * width)


class QwenImage1(BlockNetwork):
    """Predicts the velocity of the flow in noised latents."""

    # Comfy-Org's recipe and convert_to_quant leave out the first block's modulation of the image
    rounded = Rounded(
        ("transformer_blocks.*",),
        exact=frozenset(("img_mod", "txt_mod")),
        unless_rotated=("transformer_blocks.0.img_mod.*",),
    )

    def __init__(self, arch: QwenImage1Arch) -> None:
        self.arch = arch
        self.turns = RopeTables(partial(_angles, arch))
        width = arch.width
        self.img_in = nn.Linear(PATCH**2 * arch.channels, width)
        self.txt_norm = nn.RMSNorm(arch.text_dim, _EPS)
        self.txt_in = nn.Linear(arch.text_dim, width)
        self.time_text_embed = TimeEmbedding(width)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(arch) for _ in range(arch.depth)])
        self.norm_out = LastNorm(width)
        self.proj_out = nn.Linear(width, PATCH**2 * arch.channels)

    def forward(
        self,
        x_BHWC: Tensor,
        times_B: Tensor,
        states_BTF: Tensor,
        rows_B: Tensor,
        controls: Sequence[Tensor] = (),
        zero_cond: bool = False,
    ) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents, which like the states have the dtype of the weights.

        Args:
            states_BTF: a text's states (B, T, text_dim).
            zero_cond: whether control images are modulated as at time 0.

        Raises:
            ShapeError: latents of other sizes.
        """
        images = (x_BHWC, *controls)
        grids = tuple(token_grid("Qwen-Image 1's transformer", x, self.arch.channels, PATCH)[1:] for x in images)
        (h, w), B, T = grids[0], x_BHWC.shape[0], states_BTF.shape[1]
        L, M = h * w, sum(rows * columns for rows, columns in grids[1:])
        turns = self.turns.of(T, grids, nn.compute_copy(self.img_in.weight))
        places_1T = Tensor(rows_B.backend.xp.arange(T, dtype=np.float32)[None])
        own_BT = places_1T < rows_B.to(float32).reshape(B, 1)
        mask = F.pad(own_BT, (0, L + M), value=True).reshape(B, 1, 1, -1)
        time_B1D, runs = self._time(times_B, x_BHWC), None
        time_BND = time_B1D
        if controls and zero_cond:
            time_BND = F.cat([time_B1D, self._time(times_B * 0.0, x_BHWC)], dim=1)
            runs = L // math.gcd(L, M), M // math.gcd(L, M)
        tokens = [patchify(x, PATCH, channels_first=True) for x in images]
        img_BLD = self.img_in(F.cat(tokens, dim=1) if controls else tokens[0])
        txt_BTD = self.txt_in(self.txt_norm(states_BTF))
        for block in self.transformer_blocks:
            img_BLD, txt_BTD = block(img_BLD, txt_BTD, time_BND, *turns, mask, runs)
        scale, shift = F.chunk(self.norm_out.linear(time_B1D), 2, dim=-1)
        made = self.proj_out(modulated(img_BLD[:, :L] if controls else img_BLD, shift, scale))
        return unpatchify(made, (h, w), PATCH, channels_first=True)

    def _time(self, times_B: Tensor, like: Tensor) -> Tensor:
        """Returns silu of the vector of each time, (B, 1, D)."""
        embedder = self.time_text_embed.timestep_embedder
        sinusoid = F.timestep_embedding(times_B * 1000.0, FREQUENCIES, dtype=like.dtype)
        return F.silu(embedder.linear_2(F.silu(embedder.linear_1(sinusoid)))).unsqueeze(1)


def _angles(arch: QwenImage1Arch, text: int, grids: Grids) -> Angles:
    """Returns rotary angles (S, E), rows and columns counted from each image's middle.

    The image stands at 0, control images at 1, 2, and so on. The text begins where the longest half of a side ends.
    """
    begin = max(side // 2 for grid in grids for side in grid)
    along = np.repeat((begin + np.arange(text))[:, None], 3, axis=1)
    images = []
    for number, (rows, columns) in enumerate(grids):
        places = np.full((rows, columns, 3), float(number))
        places[..., 1] = (np.arange(rows) - (rows - rows // 2))[:, None]
        places[..., 2] = np.arange(columns) - (columns - columns // 2)
        images.append(places.reshape(-1, 3))
    return rope_angles(np.concatenate([along, *images]), arch.axes, arch.theta)
