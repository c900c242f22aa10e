"""The models of `bench step` and `bench memory`: published sizes, random weights, text encoders, a batch's arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np

from ...data.buckets import Placement
from ...engine.backend import Backend
from ...engine.dtype import DType
from ...engine.random import bits, uniform_of
from ...errors import ConfigError
from ...models.common.model import Model
from ...models.registry import FAMILIES, NOTHING_NAMED, Family
from ...networks.block_network import BlockNetwork, Checkpointing
from ...text_encoders.running import RunningEncoder, tokens_of

SIZE_CONDITIONING: Final = 6 * 256
"""The part of the UNet's vector with sizes and crops."""

Arrays = dict[str, np.ndarray[Any, Any]]


def names() -> list[str]:
    """Returns every model that can be measured. The tiny ones have the published structure and are for a quick look."""
    return [name for family in FAMILIES.values() for name in family.published]


def find(name: str) -> tuple[Family, Model]:
    """Returns the model of that name, its weights declared. Raises `ConfigError` for one that is not known."""
    for family in FAMILIES.values():
        if name in family.published:
            return family, family.declared(family.published[name](), NOTHING_NAMED)
    raise ConfigError(f"bench: expected a model among {', '.join(names())}, got {name}")


def normal(*shape: int) -> np.ndarray[Any, Any]:
    """Returns standard normal values, fp32, the same for the same shape."""
    return np.random.default_rng(list(shape)).standard_normal(shape, np.float32)


def uniform(backend: Backend, number: int, shape: tuple[int, ...], bound: float, dtype: DType) -> Any:
    """Returns values on the device, evenly spread within `bound` of 0, the same for the same `number`."""
    xp = backend.xp
    rows = xp.arange(shape[0], dtype=np.int64)
    words = bits(xp, 0, 48, number, rows, int(np.prod(shape[1:])))
    return ((uniform_of(words) - np.float32(0.5)) * np.float32(2 * bound)).reshape(shape).astype(dtype)


def conditioning(model: Model, sides: tuple[int, int], size: int) -> Arrays:
    """Returns random arrays (size, ...) of the longest captions, and those that follow from the sides of an image."""
    captions = {name: normal(size, *shape) for name, shape in model.caption_shapes().items()}
    captions |= {p.rows: np.full(size, p.most, np.int32) for p in model.paddings.values() if p.rows}
    told = model.size_conditioning(Placement(sides, sides, sides, 0, 0))
    return captions | {name: np.stack([array] * size) for name, array in told.items()}


_CAPTION: Final = "a photograph of a lighthouse on a rock above the sea"


def running_encoders(
    model: Model, trained: Collection[str], checkpointing: Checkpointing, fill: Callable[[BlockNetwork], None]
) -> tuple[RunningEncoder, ...]:
    """Returns the encoders of the keys `trained`, their weights filled in by `fill`."""
    found = []
    for encoder in model.encoders(trained):
        network = encoder.part.build()
        assert isinstance(network, BlockNetwork)
        network.checkpointing = checkpointing
        fill(network)
        found.append(RunningEncoder(encoder, network))
    return tuple(found)


def with_token_ids(arrays: Mapping[str, np.ndarray[Any, Any]], running: Collection[RunningEncoder]) -> Arrays:
    """Returns a batch's arrays, with the token ids of one caption for the arrays that `running` make."""
    size = len(next(iter(arrays.values())))
    made = {name for each in running for name in each.encoder.outputs}
    made |= {f"{name}_rows" for name in made}
    ids = tokens_of([each.encoder for each in running], _CAPTION)
    kept = {name: array for name, array in arrays.items() if name not in made}
    return kept | {name: np.stack([array] * size) for name, array in ids.items()}
