"""Adapters in a network: put into the slots of its layers, and taken out of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from flame_train.adapters.targets import LayerSettings, layer_shapes
from flame_train.engine import Parameter, Tensor, nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import compute_dtype, float32
from flame_train.engine.mode import no_grad
from flame_train.errors import ModelFileError, counted

from .dropped_adapter import dropping
from .dropping import Chances, Drops
from .factors import Array
from .file_form import UP
from .kinds import ADAPTERS, Adapter, AdapterKind, Factors, Layer, Make
from .kinds.lora import Lora

MakeAnywhere = Callable[[str, Array, str], Parameter]
"""Makes a parameter from its name, fp32 values on the host, and a device: an arena may place it."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The adapters that sit in a model, by layer name, until `detach` takes them out."""

    model: nn.Module
    adapters: Mapping[str, Adapter]
    drops: Drops = field(default_factory=Drops)
    faster: str = ""
    """How the names of parameters end that LoRA+ trains at a higher rate."""

    def parameters(self) -> list[Parameter]:
        """Returns every trained matrix, LoRA's down before up; those of layers that share an input next to each other.

        An arena lays them out in this order, so that one product can read them all.
        """
        name_of = {id(layer): name for name, layer in layers_of(self.model).items()}
        groups = [[name_of[id(layer)] for layer in group] for group in self.model.fusable_groups()]
        joined = [group for group in groups if all(name in self.adapters for name in group)]
        alone = [[name] for name in self.adapters if not any(name in group for group in joined)]
        return [p for group in (*joined, *alone) for p in self._interleaved(group)]

    def _interleaved(self, names: Sequence[str]) -> Iterator[Parameter]:
        """Yields first matrices of all the layers, then second ones; of layers with other matrices, layer by layer."""
        matrices = [self.adapters[name].parameters() for name in names]
        if len({tuple(parts) for parts in matrices}) == 1:
            yield from (parts[which] for which in matrices[0] for parts in matrices)
        else:
            yield from (p for parts in matrices for p in parts.values())

    def limit(self, max_norm: float) -> None:
        """Makes every update smaller whose norm is above `max_norm`: device work only."""
        for adapter in self.adapters.values():
            adapter.limit(max_norm)

    def detach(self) -> None:
        """Removes the adapters; the model computes as before `attach`."""
        for name, layer in layers_of(self.model).items():
            if name in self.adapters and layer.adapter is self.adapters[name]:
                layer.adapter = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the model computes as without its adapters, in the same captured program."""
        layers = layers_of(self.model)
        for name in self.adapters:
            layers[name].adapter = None
        try:
            yield
        finally:
            for name, adapter in self.adapters.items():
                layers[name].adapter = adapter

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each adapted weight's name with W + delta, added in fp32 or better and rounded once to W's dtype."""
        layers = layers_of(self.model)
        for name, adapter in self.adapters.items():
            stored = layers[name].weight
            with no_grad():
                weight = stored.dequantize(float32) if isinstance(stored, nn.QuantizedWeight) else stored
                total = weight.to(compute_dtype(weight.dtype)) + adapter.delta()
                yield f"{name}.weight", total.to(weight.dtype)


def attach(
    model: nn.Module,
    names: Sequence[str],
    *,
    rank: int,
    alpha: float,
    seed: int,
    kind: AdapterKind | None = None,
    make_parameter: MakeAnywhere | None = None,
    scale: str = "rank",
    chances: Chances | None = None,
    settings: Mapping[str, LayerSettings] = MappingProxyType({}),
    per_sample_sign: bool = False,
) -> Attached:
    """Puts a new adapter into each named layer of a loaded `model`, whose output stays; returns them by layer.

    Args:
        names: names of its linear layers and convolutions.
        rank, alpha: the inner width, and the numerator of the update's scale alpha / rank.
        seed: seed of the first values, which also depend on the layer's name.
        kind: the adapter kind; None: LoRA.
        make_parameter: makes a parameter, called `<layer>.lora_down.weight` and so on.
        scale: "rank", or "sqrt_rank": the update is scaled by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732).
        settings: what layers have of their own instead of `rank`, `alpha` and dropout.
        chances: what a step leaves out, within `Attached.drops.during`.
        per_sample_sign: whether `Attached.drops.during` may give adapters another strength.

    Raises:
        KeyError: a name is no layer.
        ValueError: a layer has an adapter already, or is a convolution in groups or dilated.
    """
    kind, layers, drops = kind or Lora(), layers_of(model), Drops()
    _check_room(layers, names)
    adapters: dict[str, Any] = {}
    for name in names:
        layer, own = layers[name], settings.get(name, LayerSettings())
        own_rank, own_alpha = _size(kind, layer, own, rank, alpha)
        own_alpha *= math.sqrt(own_rank) if scale == "sqrt_rank" else 1.0
        model.ensure_loaded(name)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        first = kind.initial(layer, own_rank, own_alpha, rng)
        adapter = kind.from_factors(layer, first, 1.0, _maker(name, layer, make_parameter))
        left_out = chances or Chances()
        left_out = left_out if own.dropout is None else replace(left_out, dropout=own.dropout)
        adapters[name] = layer.adapter = dropping(adapter, name, left_out, drops, per_sample_sign)
    return Attached(model, MappingProxyType(adapters), drops, kind.files.written.get(UP, ""))


def _size(kind: AdapterKind, layer: Layer, own: LayerSettings, rank: int, alpha: float) -> tuple[int, float]:
    """Returns rank and alpha on a layer: its own before what its kind has on such layers."""
    usual_rank, usual_alpha = kind.sizes(tuple(layer.weight.shape), rank, alpha)
    return own.rank or usual_rank, own.alpha or usual_alpha


def attach_factors(model: nn.Module, factors: Mapping[str, Factors], strength: float = 1.0) -> Attached:
    """Puts finished adapters into a loaded `model`, `strength` times as strong as they were trained; held in fp32.

    Raises ModelFileError with the modules that the model lacks or whose shapes differ. Raises ValueError for a layer
    that has an adapter already, or is a convolution in groups or dilated.
    """
    layers = layers_of(model)
    require_fit(model, factors)
    _check_room(layers, factors)
    adapters: dict[str, Any] = {}
    for name, f in factors.items():
        model.ensure_loaded(name)
        adapter = ADAPTERS[f.kind]().from_factors(layers[name], f, strength, _maker(name, layers[name]))
        adapters[name] = layers[name].adapter = adapter
    return Attached(model, MappingProxyType(adapters))


def shared(attached: Attached, model: nn.Module) -> Attached:
    """Returns the adapters in the layers of another loaded network too: what is trained in one acts in both."""
    layers, adapters = layers_of(model), {}
    for name, adapter in attached.adapters.items():
        model.ensure_loaded(name)
        adapters[name] = layers[name].adapter = adapter.on(layers[name])
    return replace(attached, model=model, adapters=MappingProxyType(adapters))


def require_fit(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Raises ModelFileError with the modules of `factors` that `model`, loaded or not, lacks or has in other shapes."""
    shapes = layer_shapes(model)
    strangers = [name for name in factors if name not in shapes]
    strangers += [name for name, f in factors.items() if name in shapes and not f.fits(shapes[name])]
    if strangers:
        raise ModelFileError(
            f"the LoRA does not fit the model: {len(strangers)} of its {len(factors)} modules are not there or have "
            f"other shapes, such as {', '.join(strangers[:5])}; it was trained on another base model"
        )


@contextmanager
def at_strength(attached: Attached, strength: float) -> Iterator[nn.Module]:
    """Within, copies of the adapters act in their places, `strength` times as strong; they themselves stay as they are.

    A strength of 1 copies nothing.
    """
    if strength == 1.0:
        yield attached.model
        return
    factors = {name: adapter.factors() for name, adapter in attached.adapters.items()}
    attached.detach()
    try:
        copies = attach_factors(attached.model, factors, strength)
        try:
            yield attached.model
        finally:
            copies.detach()
    finally:
        layers = layers_of(attached.model)
        for name, adapter in attached.adapters.items():
            layers[name].adapter = adapter


def _maker(layer_name: str, layer: Layer, make: MakeAnywhere | None = None) -> Make:
    device = layer.weight.device

    def made(name: str, values: Array) -> Parameter:
        name = f"{layer_name}.{name}"
        return make(name, values, device) if make else Parameter(get_backend(device).to_device(values), name)

    return made


def _check_room(layers: Mapping[str, Layer], names: Iterable[str]) -> None:
    taken = [name for name in names if layers[name].adapter is not None]
    if taken:
        have = counted(len(taken), "layer has", "layers have")
        raise ValueError(f"attach: {have} an adapter already, such as {taken[0]}; detach first")
    chosen = ((name, layers[name]) for name in names)
    odd = [n for n, x in chosen if isinstance(x, nn.Conv2d) and (x.groups != 1 or x.dilation not in (1, (1, 1)))]
    if odd:
        raise ValueError(f"attach: no LoRA for convolutions that are dilated or in groups, such as {odd[0]}")


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Returns the layers that take an adapter, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))}
