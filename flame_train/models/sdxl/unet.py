"""The denoiser of SDXL and Stable Diffusion 1 and 2: a UNet with transformers (arXiv 2307.01952, 2112.10752).

Attribute names are those of the published single file below `model.diffusion_model.`. Activations are
channels-last, so a transformer block sees its positions without a transpose.
Shape letters: B batch, H height and W width in latent pixels, C channels, T text positions, E embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType
from flame_train.errors import ModelFileError
from flame_train.models.sdxl.names_unet import AS_SD, AS_SDXL, stated_heads
from flame_train.models.sdxl.resnet import Downsample, ResBlock, Upsample
from flame_train.models.sdxl.transformer import SpatialTransformer, TextKeys, TransformerBlock
from flame_train.networks.arch import shape_of
from flame_train.networks.block_network import BlockNetwork, Rounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import check_latents

_shape: Final = partial(shape_of, "UNet", "a UNet of Stable Diffusion or SDXL")


SIZE_EMBEDDING = 256  # the sinusoid's width for each of the six sizes
SIZES = 6
_EPS: Final = 1e-5
_FIRST: Final = "input_blocks.0.0.weight"
_VECTOR: Final = "label_emb.0.0.weight"
_OTHERS: Final = {5: "a depth", 7: "an upscaling", 8: "an InstructPix2Pix (edit)", 9: "an inpainting"}
"""What published models are whose UNet sees more than latents, by its channels."""


@dataclass(frozen=True, slots=True)
class UNetArch:
    """The network's shapes, and the numbers that the shapes do not determine: of heads, of groups, and eps."""

    in_channels: int = 4
    out_channels: int = 4
    model_channels: int = 320
    channel_mult: tuple[int, ...] = (1, 2, 4)
    num_res_blocks: int = 2
    transformer_depth: tuple[int, ...] = (0, 2, 10)  # blocks a transformer, by level
    middle_depth: int = 0  # of the middle's transformer; 0: as many as at the last level
    context_dim: int = 2048
    adm_in_channels: int = 2816  # pooled text and six size embeddings; 0: it sees neither
    head_dim: int = 64
    heads: int = 0  # of each transformer, however wide; 0: as many as head_dim says
    linear_projections: bool = True  # into and out of a transformer; else they are 1x1 convolutions
    groups: int = 32
    eps: float = _EPS  # of the norms in residual blocks and before the last convolution

    @classmethod
    def sdxl(cls) -> Self:
        """Returns the published SDXL base."""
        return cls()

    @classmethod
    def sd1(cls) -> Self:
        """Returns Stable Diffusion 1's."""
        arch = cls(channel_mult=(1, 2, 4, 4), transformer_depth=(1, 1, 1, 0), middle_depth=1, context_dim=768)
        return replace(arch, adm_in_channels=0, heads=8, linear_projections=False)

    @classmethod
    def sd2(cls) -> Self:
        """Returns Stable Diffusion 2's: a wider text, and heads as wide as SDXL's."""
        return replace(cls.sd1(), context_dim=1024, heads=0, linear_projections=True)

    @classmethod
    def tiny(cls, model_channels: int = 32, context_dim: int = 64, pooled_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU; fits `ClipArch.tiny` twice."""
        return cls(
            model_channels=model_channels,
            transformer_depth=(0, 1, 2),
            context_dim=context_dim,
            adm_in_channels=pooled_dim + SIZES * SIZE_EMBEDDING,
            head_dim=_head_dim(model_channels),
            groups=_groups(model_channels),
        )

    @classmethod
    def tiny_sd1(cls, model_channels: int = 16, context_dim: int = 32) -> Self:
        """Returns the structure of Stable Diffusion 1's, small enough for a CPU; fits `ClipArch.tiny`."""
        small = cls.tiny(model_channels, context_dim)
        made = replace(cls.sd1(), model_channels=model_channels, context_dim=context_dim, groups=small.groups)
        return replace(made, head_dim=small.head_dim, heads=_heads(model_channels))

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says. Refuses inpainting, edit and other variants."""
        vector = shapes.get(_VECTOR, (0, 0))[1]
        stated.require(**(AS_SDXL if vector else AS_SD))
        seen, made = _shape(shapes, _FIRST)[1], _shape(shapes, "out.2.weight")[0]
        if seen != made:
            raise ModelFileError(
                f"UNet: expected as many channels in as out, found {seen} and {made}: this is "
                f"{_OTHERS.get(seen, 'an inpainting or edit')} model, which needs a second image; use the base model"
            )
        ends = sorted(int(m[1]) for m in _matches(r"input_blocks\.(\d+)\.0\.op\.weight", shapes))
        per_level = ends[0] if ends else max(_numbers(r"input_blocks\.(\d+)\.", shapes), default=0) + 1
        firsts = [1 + level * per_level for level in range(len(ends) + 1)]
        channels = _shape(shapes, _FIRST)[0]
        widths = [_shape(shapes, f"input_blocks.{i}.0.in_layers.2.weight")[0] for i in firsts]
        contexts = {
            shape[1] for name, shape in shapes.items() if name.endswith("transformer_blocks.0.attn2.to_k.weight")
        }
        if len(contexts) != 1:
            raise ModelFileError(f"UNet: expected one text width in the attn2.to_k weights, found {sorted(contexts)}")
        places = [*(rf"input_blocks\.{i}" for i in firsts), "middle_block"]
        *depths, middle = (len(_numbers(rf"{place}\.1\.transformer_blocks\.(\d+)\.", shapes)) for place in places)
        linear = vector > 0 or len(_shape(shapes, "middle_block.1.proj_in.weight")) == 2
        head_dim, heads = stated_heads(stated, widths, depths) or _usual_heads(channels, linear)
        return cls(
            in_channels=seen,
            out_channels=made,
            model_channels=channels,
            channel_mult=tuple(w // channels for w in widths),
            num_res_blocks=per_level - 1,
            transformer_depth=tuple(depths),
            middle_depth=0 if middle == depths[-1] else middle,
            context_dim=contexts.pop(),
            adm_in_channels=vector,
            head_dim=head_dim,
            heads=heads,
            linear_projections=linear,
            groups=int(stated.number("norm_num_groups", _groups(channels))),
            eps=stated.number("norm_eps", _EPS),
        )


def _head_dim(model_channels: int) -> int:
    """Returns the family's 64, less in narrower networks, where the folder does not state it."""
    return min(64, model_channels // 2)


def _heads(model_channels: int) -> int:
    """Returns Stable Diffusion 1's 8, less in narrower networks."""
    return max(1, min(8, model_channels // 8))


def _usual_heads(model_channels: int, linear: bool) -> tuple[int, int]:
    """Returns `head_dim` and `heads` where the folder states neither: 1x1 convolutions are Stable Diffusion 1's."""
    return _head_dim(model_channels), 0 if linear else _heads(model_channels)


def _groups(model_channels: int) -> int:
    """Returns the family's 32, less in narrower networks, where the folder does not state it."""
    return min(32, model_channels // 4)


def _matches(pattern: str, names: Iterable[str]) -> list[re.Match[str]]:
    return [m for n in names if (m := re.match(pattern, n))]


def _numbers(pattern: str, names: Iterable[str]) -> set[int]:
    return {int(m[1]) for m in _matches(pattern, names)}


def size_conditioning(time_ids_B6: Tensor, dtype: DType | str) -> Tensor:
    """Returns SDXL's size conditioning, each number as a 256-wide sinusoid: (B, 6) -> (B, 1536).

    The six are original height and width, crop top and left, target height and width, in pixels
    (arXiv 2307.01952, section 2.2).
    """
    B = time_ids_B6.shape[0]
    flat = F.timestep_embedding(time_ids_B6.reshape(B * SIZES), SIZE_EMBEDDING, dtype=dtype)
    return flat.reshape(B, SIZES * SIZE_EMBEDDING)


def vector_conditioning(pooled_BE: Tensor, time_ids_B6: Tensor) -> Tensor:
    """Returns SDXL's `vector` input: the pooled text, then the six sizes; (B, 2816) for the published model."""
    return F.cat([pooled_BE, size_conditioning(time_ids_B6, pooled_BE.dtype)], dim=-1)


class UNet(BlockNetwork):
    """Predicts the noise (or the velocity) in noised latents.

    Its blocks are the residual and transformer blocks; the latter alone have a feed-forward, the widest layers.
    """

    # the transformers'; the other layers are convolutions and embeddings
    rounded = Rounded(("*.transformer_blocks.*", "*.proj_in", "*.proj_out"))

    def __init__(self, arch: UNetArch) -> None:
        self.arch = arch
        emb_dim = 4 * arch.model_channels
        self.time_embed = _mlp(arch.model_channels, emb_dim)
        if arch.adm_in_channels:
            self.label_emb = nn.ModuleList([_mlp(arch.adm_in_channels, emb_dim)])
        skips = self._build_down()
        width = arch.model_channels * arch.channel_mult[-1]
        self.middle_block = nn.ModuleList(
            [
                self._resblock(width, width),
                self._transformer(width, arch.middle_depth or arch.transformer_depth[-1]),
                self._resblock(width, width),
            ]
        )
        self._build_up(skips)
        self.out = nn.ModuleList(
            [
                nn.GroupNorm(arch.groups, arch.model_channels, arch.eps, silu=True),
                None,
                nn.Conv2d(arch.model_channels, arch.out_channels, 3, padding=1),
            ]
        )
        self._blocks = [part for _, part in self.named_modules() if isinstance(part, TransformerBlock)]

    def _build_down(self) -> list[int]:
        """Makes the way down; returns the channels that each of its blocks leaves for the way up."""
        arch = self.arch
        width = arch.model_channels
        self.input_blocks = nn.ModuleList([nn.ModuleList([nn.Conv2d(arch.in_channels, width, 3, padding=1)])])
        skips = [width]
        for level, mult in enumerate(arch.channel_mult):
            for _ in range(arch.num_res_blocks):
                out = arch.model_channels * mult
                self.input_blocks.append(self._stage(width, out, level))
                width = out
                skips.append(width)
            if level + 1 < len(arch.channel_mult):
                self.input_blocks.append(nn.ModuleList([Downsample(width)]))
                skips.append(width)
        return skips

    def _build_up(self, skips: list[int]) -> None:
        arch = self.arch
        width = skips[-1]
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(arch.channel_mult))):
            out = arch.model_channels * mult
            for i in range(arch.num_res_blocks + 1):
                stage = self._stage(width + skips.pop(), out, level)
                width = out
                if level and i == arch.num_res_blocks:
                    stage.append(Upsample(width))
                self.output_blocks.append(stage)

    def _stage(self, in_channels: int, out_channels: int, level: int) -> nn.ModuleList:
        depth = self.arch.transformer_depth[level]
        parts: list[nn.Module | None] = [self._resblock(in_channels, out_channels)]
        return nn.ModuleList([*parts, self._transformer(out_channels, depth)] if depth else parts)

    def _resblock(self, in_channels: int, out_channels: int) -> ResBlock:
        arch = self.arch
        return ResBlock(in_channels, out_channels, 4 * arch.model_channels, arch.groups, arch.eps)

    def _transformer(self, channels: int, depth: int) -> SpatialTransformer:
        a = self.arch
        heads = a.heads or channels // a.head_dim
        return SpatialTransformer(channels, depth, a.context_dim, heads, a.groups, a.linear_projections)

    def forward(
        self, x_BHWC: Tensor, timesteps_B: Tensor, context_BTC: Tensor, vector_BE: Tensor | None = None
    ) -> Tensor:
        """Returns the prediction (B, H, W, out_channels) for latents (B, H, W, in_channels).

        H and W must be multiples of 4 for three levels (2 to the number of downsamplings). Timesteps are in 0..999.
        The text encoders give context (B, T, context_dim), `vector_conditioning` gives vector (B, adm_in_channels), of
        which Stable Diffusion 1 and 2 have none.
        Everything but the timesteps is in the dtype of the weights. Raises ShapeError for other latents.
        """
        check_latents("UNet", x_BHWC, self.arch.in_channels, 2 ** (len(self.arch.channel_mult) - 1))
        silu_emb_BE = F.silu(
            self._embed(timesteps_B, context_BTC.dtype, vector_BE)
        )  # every residual block's first step, done once
        text = self._text(context_BTC)
        h_BHWC, skips = x_BHWC, []
        for stage in self.input_blocks:
            h_BHWC = self._run(stage, h_BHWC, silu_emb_BE, text)
            skips.append(h_BHWC)
        h_BHWC = self._run(self.middle_block, h_BHWC, silu_emb_BE, text)
        for stage in self.output_blocks:
            h_BHWC = self._run(stage, h_BHWC, silu_emb_BE, text, skips.pop())
        return self.out[2](self.out[0](h_BHWC))

    def fusable_groups(self) -> list[list[nn.Linear]]:
        """Returns each block's projections of the image, and all blocks' projections of the text, by width."""
        images = [[b.attn1.to_q, b.attn1.to_k, b.attn1.to_v] for b in self._blocks]
        widths = dict.fromkeys(b.attn2.to_k.out_features for b in self._blocks)
        return images + [self._text_layers(width) for width in widths]

    def run_outside(self) -> list[nn.Linear]:
        """Returns the projections of the text."""
        return [layer for b in self._blocks for layer in (b.attn2.to_k, b.attn2.to_v)]

    def _text_layers(self, width: int) -> list[nn.Linear]:
        """Returns keys' and values' projections of all blocks of a width, by turns."""
        blocks = [b for b in self._blocks if b.attn2.to_k.out_features == width]
        return [layer for b in blocks for layer in (b.attn2.to_k, b.attn2.to_v)]

    def _text(self, context_BTC: Tensor) -> TextKeys:
        """Returns the text's keys and values for every block, computed once: those of one width in one product."""
        by_block: dict[TransformerBlock, tuple[Tensor, Tensor]] = {}
        for width in dict.fromkeys(b.attn2.to_k.out_features for b in self._blocks):
            projections = iter(nn.grouped_linear(self._text_layers(width), context_BTC))
            by_block |= {
                b: (next(projections), next(projections)) for b in self._blocks if b.attn2.to_k.out_features == width
            }
        return by_block

    def _embed(self, timesteps_B: Tensor, dtype: DType, vector_BE: Tensor | None) -> Tensor:
        """Time and vector as one embedding (B, 4 * model_channels); the sinusoid is computed in fp32."""
        t_BE = F.timestep_embedding(timesteps_B, self.arch.model_channels, dtype=dtype)
        first, last = self.time_embed[0], self.time_embed[2]
        time_BE = last(F.silu(first(t_BE)))
        if vector_BE is None:
            return time_BE
        label = self.label_emb[0]
        return time_BE + label[2](F.silu(label[0](vector_BE)))

    def _run(
        self,
        stage: nn.ModuleList,
        h_BHWC: Tensor,
        silu_emb_BE: Tensor,
        text: TextKeys,
        skip_BHWC: Tensor | None = None,
    ) -> Tensor:
        """Runs one numbered block of the checkpoint: residual block, transformer and resampling, in its order."""
        for part in stage:
            if isinstance(part, ResBlock):
                h_BHWC = part(h_BHWC, silu_emb_BE, skip_BHWC)
            elif isinstance(part, SpatialTransformer):
                h_BHWC = part(h_BHWC, text)
            else:
                h_BHWC = part(h_BHWC)
        return h_BHWC


def _mlp(in_features: int, out_features: int) -> nn.ModuleList:
    """Returns the layers linear, silu, linear; entry 1 is the activation, which holds no weights."""
    return nn.ModuleList([nn.Linear(in_features, out_features), None, nn.Linear(out_features, out_features)])
