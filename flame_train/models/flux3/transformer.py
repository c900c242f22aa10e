"""FLUX.3's denoiser: blocks for each kind of token, then blocks over all; attention and MLP lie side by side in each.

Attribute names are those of the published single file. The architecture was published as code only. Activations are
channels-last. A token is one pixel of the patched latents. No layer has a bias.

Shape letters of images: B batch, H height and W width in latent pixels, C channels of a pixel.
Shape letters of tokens: L image tokens, T text tokens, S all of them, D model width, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn, rematerialize
from flame_train.engine import functional as F
from flame_train.models.flux.blocks import EPS, QKNorm, attend
from flame_train.models.flux2.transformer import FREQUENCIES, FinalLayer, MLPEmbedder, Modulation, gated
from flame_train.networks.arch import TransformerArch, block_count, shape_of
from flame_train.networks.block_network import Block, BlockNetwork, Rounded, bounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import check_latents
from flame_train.networks.rope import Angles, Grids, RopeTables, grid, rope_angles

_THETA: Final = 10000.0
_SCALE: Final = 0.5  # of rows and columns, before they become angles
_PARTS: Final = 4  # what a block gets of each kind of tokens
_FLOW_MAP: Final = "ref_time_in.in_layer.weight"
_shape: Final = partial(shape_of, "FLUX.3", "a FLUX.3 transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flux3Arch(TransformerArch):
    """Everything that decides the network's shapes."""

    depth: int
    """Blocks for each kind of tokens: the image's, those of control images, the text's."""
    single_depth: int
    """Blocks over all tokens."""
    mlp: int
    """The width of the gated MLPs."""
    channels: int = 128
    """Of the patched latents."""
    control_channels: int = 128
    """Of those of control images."""
    context_dim: int
    """Of the text encoder's output."""
    flow_map: bool = field(default=False, compare=False)
    """Whether it was distilled to few steps, and is told the time that a step goes to; a LoRA is the same for both."""

    @classmethod
    def klein(cls) -> Self:
        """Returns FLUX.3 klein base."""
        return cls(width=3072, depth=5, single_depth=28, mlp=9216, context_dim=20480)

    @classmethod
    def tiny(cls, context_dim: int = 256) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(width=64, depth=1, single_depth=2, head_dim=32, mlp=192, context_dim=context_dim)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says."""
        width, channels = _shape(shapes, "emb_in.image.weight")
        arch = cls(
            width=width,
            depth=block_count(shapes, "txt_mode_blocks"),
            single_depth=block_count(shapes, "single_blocks"),
            head_dim=_shape(shapes, "single_blocks.0.norm.query_norm.scale")[0],
            mlp=_shape(shapes, "single_blocks.0.mlp_out.weight")[1],
            channels=channels,
            control_channels=_shape(shapes, "emb_in.image_cond.weight")[1],
            context_dim=_shape(shapes, "txt_in.weight")[1],
            flow_map=_FLOW_MAP in shapes,
        )
        stated.require(
            attention_head_dim=arch.head_dim,
            num_attention_heads=width // arch.head_dim,
            axes_dims_rope=arch.axes,
            rope_theta=_THETA,
            eps=EPS,
            timestep_channels=FREQUENCIES,
            flow_map=arch.flow_map,
        )
        return arch

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """How many values of a head encode time (0), row, column, and place in the text (-1, -2 of control images)."""
        each = self.head_dim // 4
        return each, each, each, each


def position_angles(arch: Flux3Arch, text: int, grids: Grids) -> Angles:
    """The angle by which each value of a head is rotated at each token, of images and then of the text, fp64 (S, E)."""
    places = []
    for number, size in enumerate(grids):
        places.append(np.pad(grid(*size)[:, 1:] * _SCALE, ((0, 0), (1, 1))))
        places[-1][:, 3] = -number
    of_text = np.zeros((text, 4))
    of_text[:, 3] = np.arange(text)
    return rope_angles(np.concatenate([*places, of_text]), arch.axes, _THETA)


class Kinds(nn.Module):
    """A part of each kind of tokens: the image's, those of control images, and where there is one the text's."""

    image: Any
    image_cond: Any
    txt: Any

    def __init__(self, **parts: nn.Module) -> None:
        for kind, part in parts.items():
            setattr(self, kind, part)


class ParallelBlock(Block):
    """Attention and a gated MLP of the same modulated tokens; both are added at once."""

    def __init__(self, arch: Flux3Arch) -> None:
        width = arch.width
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm = QKNorm(arch.head_dim)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 2 * arch.mlp, bias=False)
        self.mlp_out = nn.Linear(arch.mlp, width, bias=False)

    def forward(self, cos_S1E: Tensor, sin_S1E: Tensor, seen_B: Tensor | None, *kinds: Tensor) -> tuple[Tensor, ...]:
        """Returns the tokens of each kind after the block.

        Args:
            kinds: of each kind of tokens in turn the tokens (B, L, D), and shift, scale and gate, (B, 1, D).
        """
        each = [kinds[i : i + _PARTS] for i in range(0, len(kinds), _PARTS)]
        ungated = [part for own in each for part in own[:-1]]
        x_BSD = _modulated(*ungated)
        qkv = nn.grouped_linear([self.q_proj, self.k_proj, self.v_proj], x_BSD)
        found_BSD = self.attn_out(attend([(self.norm, qkv)], cos_S1E, sin_S1E, seen_B=seen_B))
        if self.checkpointing == "mlp":
            made_BSD = checkpoint(self._fed_anew, found_BSD, *ungated)
        else:
            made_BSD = self._fed(x_BSD, found_BSD)
        parts = F.split(made_BSD, [own[0].shape[1] for own in each], dim=1)
        return tuple(
            bounded(F.gated_add(tokens, gate, outputs))
            for (tokens, _, _, gate), outputs in zip(each, parts, strict=True)
        )

    def _fed(self, x_BSD: Tensor, found_BSD: Tensor) -> Tensor:
        # the inputs of linear layers are rematerialized: their own inputs are saved anyway
        return self.mlp_out(rematerialize(gated, self.mlp_in(x_BSD)), found_BSD)

    def _fed_anew(self, found_BSD: Tensor, *ungated: Tensor) -> Tensor:
        return self._fed(_modulated(*ungated), found_BSD)


def _modulated(*ungated: Tensor) -> Tensor:
    return rematerialize(_side_by_side, *ungated)


def _side_by_side(*ungated: Tensor) -> Tensor:
    """Tokens, shift and scale of each kind to the modulated tokens of all, (B, S, D)."""
    each = [ungated[i : i + _PARTS - 1] for i in range(0, len(ungated), _PARTS - 1)]
    normed = [F.layer_norm_modulate(tokens, scale, shift, EPS) for tokens, shift, scale in each]
    return normed[0] if len(normed) == 1 else F.cat(normed, dim=1)


class Flux3(BlockNetwork):
    """Predicts the velocity of the flow in noised latents; of a flow map, the mean velocity over a step."""

    rounded = Rounded(("content_mode_blocks.*", "txt_mode_blocks.*", "single_blocks.*"))

    def __init__(self, arch: Flux3Arch) -> None:
        self.arch = arch
        self.rope = RopeTables(partial(position_angles, arch))
        width = arch.width
        self.emb_in = Kinds(
            image=nn.Linear(arch.channels, width, bias=False),
            image_cond=nn.Linear(arch.control_channels, width, bias=False),
        )
        self.txt_in = nn.Linear(arch.context_dim, width, bias=False)
        self.time_in = MLPEmbedder(width)
        if arch.flow_map:
            self.ref_time_in = MLPEmbedder(width)
        self.early_stream_modulations, self.single_stream_modulations = (
            Kinds(**{kind: Modulation(width, 1) for kind in ("image", "image_cond", "txt")}) for _ in range(2)
        )
        self.content_mode_blocks = Kinds(image=_blocks(arch, arch.depth), image_cond=_blocks(arch, arch.depth))
        self.txt_mode_blocks = _blocks(arch, arch.depth)
        self.single_blocks = _blocks(arch, arch.single_depth)
        self.final_layer = Kinds(image=FinalLayer(width, arch.channels))

    def forward(
        self,
        x_BHWC: Tensor,
        times_B: Tensor,
        context_BTC: Tensor,
        rows_B: Tensor,
        controls: Sequence[Tensor] = (),
        target_B: Tensor | None = None,
    ) -> Tensor:
        """Returns the velocity (B, H, W, C) for noised latents.

        Args:
            target_B: the noise level that a step goes to, (B,) or (1,), fp32; of a flow map, and of no other network.

        Latents and states have the dtype of the weights.

        Raises:
            ShapeError: latents of other sizes.
            ValueError: a flow map without `target_B`, or another network with it.
        """
        if (target_B is None) == self.arch.flow_map:
            raise ValueError("FLUX.3: expected the level that a step goes to for a flow map, and for no other network")
        check_latents("FLUX.3's transformer", x_BHWC, self.arch.channels, 1)
        for latents in controls:
            check_latents("FLUX.3's transformer", latents, self.arch.control_channels, 1)
        B, H, W, C = x_BHWC.shape
        images, T = (x_BHWC, *controls), context_BTC.shape[1]
        grids = tuple((image.shape[1], image.shape[2]) for image in images)
        L, M = H * W, sum(rows * columns for rows, columns in grids)
        turns = self.rope.of(T, grids, nn.compute_copy(self.txt_in.weight))
        image, still = self._times(times_B, target_B, x_BHWC)
        early, joint = self.early_stream_modulations, self.single_stream_modulations

        img = self.emb_in.image(x_BHWC.reshape(B, L, C)), early.image(image)
        kinds = [(_through(self.content_mode_blocks.image, *img, _part(turns, 0, L)), joint.image(image))]
        if controls:
            tokens = [latents.reshape(B, -1, latents.shape[3]) for latents in controls]
            one = self.emb_in.image_cond(F.cat(tokens, dim=1)), early.image_cond(still)
            made = _through(self.content_mode_blocks.image_cond, *one, _part(turns, L, M))
            kinds.append((made, joint.image_cond(still)))
        txt = self.txt_in(context_BTC), early.txt(still)  # comes last, for attention to leave out what is behind it
        kinds.append((_through(self.txt_mode_blocks, *txt, _part(turns, M, M + T, rows_B)), joint.txt(still)))
        states, seen_B = [tokens for tokens, _ in kinds], rows_B + M
        for block in self.single_blocks:
            given = (part for tokens, (_, own) in zip(states, kinds, strict=True) for part in (tokens, *own))
            states = block(*turns, seen_B, *given)
        return self.final_layer.image(states[0], image).reshape(B, H, W, C)

    def _times(self, times_B: Tensor, target_B: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns silu of the vectors (B, D) of the image's time, and of 0, as text and control images are told."""

        def embedded(embedder: MLPEmbedder, levels: Tensor) -> Tensor:
            return embedder(F.timestep_embedding(levels * 1000.0, FREQUENCIES, dtype=like.dtype))

        both = embedded(self.time_in, times_B), embedded(self.time_in, times_B * 0.0)
        if target_B is not None:
            goal = embedded(self.ref_time_in, target_B)
            both = both[0] + goal, both[1] + goal
        return F.silu(both[0]), F.silu(both[1])


def _blocks(arch: Flux3Arch, depth: int) -> nn.ModuleList:
    return nn.ModuleList([ParallelBlock(arch) for _ in range(depth)])


def _through(
    blocks: nn.ModuleList, x_BLD: Tensor, modulation: Sequence[Tensor], around: Sequence[Tensor | None]
) -> Tensor:
    """Tokens of one kind after the blocks of their kind; `around` is what a block gets first."""
    for block in blocks:
        (x_BLD,) = block(*around, x_BLD, *modulation)
    return x_BLD


def _part(turns: Sequence[Tensor], begin: int, end: int, seen_B: Tensor | None = None) -> list[Tensor | None]:
    return [*(table[begin:end] for table in turns), seen_B]
