"""A run that begins with a finished adapter: its arrays, checked against the layers and put into new parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from flame_train.errors import ConfigError, counted

from .attach import Attached
from .factors import Factors, LoraFactors
from .kinds import ADAPTERS
from .nearest import largest

_SCALED: Final = ("lora_up.weight", "hada_w1_a", "lokr_w1", "lokr_w1_a")
"""The parameters that take up a difference of scales: an update is linear in each."""


def require_fit_for_start(
    found: Mapping[str, Factors],
    kind: str,
    ranks: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    resize: bool,
) -> None:
    """Checks that adapters of these ranks can begin with a file's factors.

    With `resize` plain LoRAs may be of another rank, and layers may be missing in the file.

    Args:
        found: the file's factors by layer.
        kind: the adapter kind of the config.
        ranks: the ranks of the config by layer.
        shapes: the weights' shapes by layer.
        resize: whether ranks may differ and layers be missing.

    Raises:
        ConfigError: the file does not fit, and why.
    """
    if strange := sorted(found.keys() - shapes.keys()):
        layers = counted(len(strange), "layer")
        raise ConfigError(f"lora.from: it adapts {layers} that the model lacks, such as {strange[0]}: another base")
    extra = sorted(found.keys() - ranks.keys())
    if extra:
        layers = counted(len(extra), "layer")
        raise ConfigError(f"lora.from: it adapts {layers} that lora.targets leave out, such as {extra[0]}")
    missing = [name for name in ranks if name not in found]
    if missing and not resize:
        raise ConfigError(
            f"lora.from: it has nothing for {counted(len(missing), 'layer')} that lora.targets choose, such as "
            f"{missing[0]}; choose fewer, or set lora.from_resize = true, and these begin fresh"
        )
    for name, factors in found.items():
        if not factors.fits(shapes[name]):
            raise ConfigError(
                f"lora.from: {name} is {factors.weight_shape} there and {shapes[name]} in the model: another base"
            )
        if factors.kind != kind:
            raise ConfigError(f'lora.from: expected a file of kind "{kind}", as lora.kind says, got "{factors.kind}"')
        if factors.rank != ranks[name] and not (resize and isinstance(factors, LoraFactors)):
            advice = " or set lora.from_resize = true" if isinstance(factors, LoraFactors) else ""
            raise ConfigError(
                f"lora.from: {name} is of rank {factors.rank} there and {ranks[name]} here; set lora.rank to it{advice}"
            )


def start_from(attached: Attached, found: Mapping[str, Factors]) -> None:
    """Puts the factors, which were checked, into the adapters' parameters: the same update on the adapters' scale."""
    for name, factors in found.items():
        adapter = attached.adapters[name]
        initial = adapter.factors()
        if isinstance(factors, LoraFactors) and isinstance(initial, LoraFactors):
            factors = resized(factors, initial)
        ratio = np.float32((factors.alpha / factors.rank) / (initial.alpha / initial.rank))
        parameters = adapter.parameters()
        suffixes = ADAPTERS[factors.kind].files.suffixes
        stored = {which: factors.arrays.get(suffixes[f".{which}"]) for which in parameters}
        if any(array is None or array.size != math.prod(parameters[w].shape) for w, array in stored.items()):
            raise ConfigError(
                f"lora.from: the matrices of {name} are of other shapes; set the keys of its kind as then"
            )
        for which, p in parameters.items():
            values = factors.arrays[suffixes[f".{which}"]].astype(np.float32).reshape(p.shape)
            p.data[...] = p.backend.to_device(values * ratio if which in _SCALED else values)


def resized(factors: LoraFactors, initial: LoraFactors) -> LoraFactors:
    """`factors` with the rank of `initial`: the largest singular values stay, missing ones begin as `initial` does."""
    rank = initial.rank
    if factors.rank == rank:
        return factors
    down, up = largest(factors, min(rank, factors.rank))
    if rank > factors.rank:
        down = np.concatenate([down, initial.down.reshape(rank, -1)[factors.rank :]])
        up = np.concatenate([up, np.zeros((len(up), rank - factors.rank), np.float32)], axis=1)
    return LoraFactors(down.reshape(initial.down.shape), up.reshape(initial.up.shape), float(rank))
