"""What a step of SDXL takes on the device beside weights and optimizer, counted block by block before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from flame_train.engine import nn
from flame_train.models.common.blocks import Block, Checkpointing
from flame_train.models.sdxl.transformer import LARGE, NARROW, SMALL, SpatialTransformer
from flame_train.models.sdxl.unet import Downsample, ResBlock, UNet, Upsample
from flame_train.training.memory import MemoryQuery

_TEXT: Final = 77  # tokens; more of them change little

_ATTENTIONS: Final = 8
"""Of a transformer block, in images: the inputs of its three norms; queries, keys, values and what was found of the
attention to itself; queries of the one to the text."""

_GATED: Final = 8
"""What geglu is given, in images."""

_PASSING: Final = 15
"""What comes and goes with the gradients of a feed-forward, in images: geglu's gradient, its result's, and the stream's
on its way."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of the network and the latent pixels that it makes.

    `skip` channels reach it past lower resolutions; `also` is the residual block on the way down, if it is one, that is
    given the same.
    """

    part: nn.Module
    pixels: int
    skip: int = 0
    also: ResBlock | None = None


def activation_bytes(unet: UNet, load: MemoryQuery) -> int:
    """The most that is there at once: all that the forward pass leaves behind, and the largest of what passes by.

    That is a feed-forward or block made again, with its gradients. A deterministic attention's scores come on top where
    cuDNN writes them down: the room for large ones is kept all the while.
    """
    places = [p for p in _walk(unet, load) if isinstance(p.part, SpatialTransformer)]
    image = max(map(_image, places), default=0)
    left = kept(unet, load)
    spared = kept(unet, replace(load, checkpointing="off")) - left
    once = image * (_PASSING + _GATED) + load.made_again(image * (_ATTENTIONS + 1), spared)
    scores = max((_scores(p, load) for p in places), default=0)
    return round(left + once) * load.batch * load.itemsize + scores


def kept(unet: UNet, load: MemoryQuery) -> int:
    """The numbers that the forward pass leaves behind for the backward pass, a picture's."""
    last = load.bucket[0] * load.bucket[1] // 64 * unet.arch.model_channels  # the last norm's input
    how = {block: load.of(name) for name, block in unet.blocks().items()}
    return last + sum(_kept(place, load, how) for place in _walk(unet, load))


def _walk(unet: UNet, load: MemoryQuery) -> Iterator[_Place]:
    """Every part on the way down, through the middle and up again."""
    pixels, width = load.bucket[0] * load.bucket[1] // 64, unet.arch.model_channels
    down = [*unet.input_blocks, unet.middle_block]
    takers = [stage[0] if isinstance(stage[0], ResBlock) else None for stage in down[1:]]
    for stage in (*down, *unet.output_blocks):
        for part in stage:
            if isinstance(part, Downsample):
                pixels //= 4
            elif isinstance(part, Upsample):
                pixels *= 4
            skip = part.in_layers[2].in_channels - width if isinstance(part, ResBlock) else 0
            yield _Place(part, pixels, skip, takers.pop() if skip else None)
            if isinstance(part, ResBlock):
                width = part.in_layers[2].out_channels


def _image(place: _Place) -> int:
    """The numbers of the image that a transformer works on, one picture's."""
    return place.pixels * place.part.proj_in.in_features


def _in_block(place: _Place, load: MemoryQuery) -> dict[str, int]:
    """What a transformer block keeps, in images, by what of it is run again.

    Small results are kept although they could be made again: what three norms made, what was found in the text, what
    geglu is given and what it makes, the latter two only if adapted layers want them, which is not asked here. What was
    found is made again in 16 bits alone, by `attend`; cards before Hopper, which have no gradients of few keys by
    themselves, keep it always.
    """
    image = _image(place) * load.batch * load.itemsize
    attentions = _ATTENTIONS + (4 if image < SMALL else int(load.itemsize > 2))
    given = _GATED if place.part.proj_in.in_features > NARROW or _GATED * image < LARGE else 0
    made = 4 if 4 * image < SMALL else 0
    return {"off": attentions + given + made, "mlp": attentions, "full": 1, "offload": 0}


def _kept(place: _Place, load: MemoryQuery, how: Mapping[Block, Checkpointing]) -> int:
    part = place.part
    if isinstance(part, ResBlock):
        first = part.in_layers[2]
        own = first.in_channels - place.skip
        of_input = {"full": own, "offload": 0}
        beside = how[part] != "offload" and not (place.also and how[place.also] != "offload")
        kept = of_input.get(how[part], own + first.out_channels)
        return place.pixels * (kept + (place.skip if beside else 0))
    if isinstance(part, SpatialTransformer):
        of_block, text = _in_block(place, load), 2 * _TEXT * part.proj_in.in_features
        kinds = [how[block] for block in part.transformer_blocks]
        texts = text * sum(kind != "offload" for kind in kinds)
        return _image(place) * (1 + sum(of_block[kind] for kind in kinds)) + texts
    return 0


def _scores(place: _Place, load: MemoryQuery) -> int:
    heads, width = place.part.transformer_blocks[0].attn1.heads, place.part.proj_in.in_features
    return load.scores(heads, width // heads, place.pixels)
