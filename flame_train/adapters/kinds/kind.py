"""The interface of an adapter kind, for training and for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from flame_train.adapters.dropping import Drop
from flame_train.adapters.factors import Array, Factors
from flame_train.adapters.file_form import FileForm
from flame_train.engine import Parameter, Tensor, nn, no_grad
from flame_train.engine.nn.layers import LayerAdapter
from flame_train.settings import Entry

Layer = nn.Linear | nn.Conv2d


class Adapter(LayerAdapter, Protocol):
    """A layer's adapter, sitting in the layer's `adapter` slot. The engine's protocol says how a layer calls it."""

    def parameters(self) -> Mapping[str, Parameter]:
        """Returns the trained matrices by the names that follow the layer's, such as `lora_down.weight`."""

    def delta(self) -> Tensor:
        """Returns the update of the weight, fp32, in its shape."""

    def factors(self) -> Factors:
        """Returns the present values on the host."""

    def dropped(self, layer: Layer, x: Tensor, drop: Drop) -> Tensor:
        """Returns the layer's output with the parts of the update that `drop` leaves in."""

    def on(self, layer: Layer) -> Adapter:
        """Returns the same trained matrices as the adapter of a layer of another network, whose weight may differ."""

    def limit(self, max_norm: float) -> None:
        """Makes the update smaller, in place, where its Frobenius norm is above `max_norm`; on the device."""


Make = Callable[[str, Array], Parameter]
"""Makes a trained parameter of a layer from its name below the layer's, and fp32 values on the host."""


class AdapterKind(Entry):
    """One kind of adapter: its fields are further keys of `[lora]`."""

    files: ClassVar[FileForm]
    """How its arrays lie in LoRA files."""

    has_dropout: ClassVar[bool] = False
    """Whether it has inner activations, of which `lora.dropout` zeroes some, and `lora.min_rank` leaves out ranks."""

    def shape_problem(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
        """A key and what is wrong with it for layers whose weights have these shapes, by name; None if nothing is."""
        return None

    def sizes(self, weight_shape: tuple[int, ...], rank: int, alpha: float) -> tuple[int, float]:
        """Returns rank and alpha on a layer whose weight has this shape."""
        return rank, alpha

    def initial(self, layer: Layer, rank: int, alpha: float, rng: np.random.Generator) -> Factors:
        """Returns the first values of a layer's adapter, with which its output does not change.

        Args:
            layer: the layer that gets the adapter.
            rank, alpha: the inner width, and the numerator of the update's scale alpha / rank.
            rng: random numbers of this layer alone.

        Raises:
            NotImplementedError: the kind does not define it.
        """
        raise NotImplementedError

    def from_factors(self, layer: Layer, factors: Any, strength: float, make: Make) -> Adapter:
        """Returns the adapter of a layer with these values, `strength` times as strong."""
        raise NotImplementedError

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        """Returns the number of trained values for a layer whose weight has this shape."""
        raise NotImplementedError


def shrink(norm: Tensor, max_norm: float, factors: Sequence[Parameter]) -> None:
    """Multiplies `factors`, of which the update is a product, so that its norm is at most `max_norm`; sd-scripts'."""
    with no_grad():
        floored = norm.clamp(max_norm / 2)
        ratio = (floored.clamp(None, max_norm) / floored) ** (1.0 / len(factors))
        for p in factors:
            p.data[...] = (p.detach() * ratio).data
