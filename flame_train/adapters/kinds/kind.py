"""The interface of an adapter kind, for training and for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from flame_train.adapters.fused import Paths
from flame_train.engine import Parameter, Tensor, nn
from flame_train.engine.nn.layers import LayerAdapter
from flame_train.settings import Entry

Layer = nn.Linear | nn.Conv2d
HostArray = np.ndarray[Any, Any]


class Factors(Protocol):
    """One module's adapter as arrays: a value that every file format stores in its own words."""

    @property
    def kind(self) -> str:
        """The name of the adapter kind: a key of `ADAPTERS`."""

    @property
    def rank(self) -> int:
        """The inner width, for the file's metadata."""

    @property
    def alpha(self) -> float:
        """The alpha, for the file's metadata."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight that it modifies."""

    @property
    def arrays(self) -> Mapping[str, HostArray]:
        """Its arrays by name, to be checked for NaN."""

    def delta(self, strength: float = 1.0) -> HostArray:
        """The update of the weight, fp32, in its shape, `strength` times as strong as it was trained."""


class Adapter(LayerAdapter, Protocol):
    """A layer's adapter, sitting in the layer's `adapter` slot. The engine's protocol says how a layer calls it."""

    def parameters(self) -> Mapping[str, Parameter]:
        """The trained matrices by the names that follow the layer's, such as `lora_down.weight`."""

    def delta(self) -> Tensor:
        """The update of the weight, fp32, in its shape."""

    def factors(self) -> Factors:
        """The present values on the host."""


class Make(Protocol):
    """Makes a parameter: an arena may place it."""

    def __call__(self, name: str, values: HostArray, device: str) -> Parameter:
        """The parameter `name` of fp32 `values` on the host."""


class AdapterKind(Entry):
    """One kind of adapter: its fields are further keys of `[lora]`."""

    ends: ClassVar[Mapping[str, str]]
    """How its tensors' names end in files, in every dialect, and which array of `Factors` each is."""

    faster: ClassVar[str] = ""
    """How the names of the parameters end that LoRA+ trains at a higher rate; empty: none."""

    def create(self, layer: Layer, name: str, rank: int, alpha: float, seed: int, make: Make) -> Adapter:
        """Makes a fresh adapter that does not change the layer's output.

        Args:
            layer: the layer that gets the adapter.
            name: its name in the network.
            rank, alpha: the inner width, and the numerator of the update's scale alpha / rank.
            seed: seed of the first values, which also depend on `name`.
            make: makes a parameter from its name and values.

        Returns:
            The adapter, which the layer's `forward` calls.

        Raises:
            NotImplementedError: the kind does not define it.
        """
        raise NotImplementedError

    def from_factors(self, layer: Layer, name: str, factors: Any, strength: float, make: Make) -> Adapter:
        """Makes the adapter of a finished file.

        Args:
            layer: the layer that gets the adapter.
            name: its name in the network.
            factors: the arrays of this layer in the file.
            strength: factor of the update; 1 is as trained.
            make: makes a parameter from its name and values.

        Returns:
            The adapter, which the layer's `forward` calls.

        Raises:
            NotImplementedError: the kind does not define it.
        """
        raise NotImplementedError

    def kohya(self, factors: Any) -> Mapping[str, HostArray]:
        """Its tensors as kohya's files have them, by what follows the module's name."""
        raise NotImplementedError

    def diffusers(self, factors: Any, paths: Paths) -> Mapping[str, tuple[Mapping[str, HostArray], Any]]:
        """Its tensors as diffusers' files have them, by path and by what follows it, with the factors of that part."""
        raise NotImplementedError

    def fault(self, slots: Mapping[str, HostArray]) -> str:
        """The problems of a module's arrays, by the names of `ends`; empty if they fit together."""
        raise NotImplementedError

    def read(self, slots: Mapping[str, HostArray], folded: float | None, scale: float) -> Factors:
        """The factors of arrays without fault.

        `folded` is the alpha that the file's metadata says was multiplied in, `scale` the one of its configuration.
        An alpha among the arrays overrides both.
        """
        raise NotImplementedError

    def join(self, parts: Mapping[str, Any], paths: Paths) -> Factors:
        """A module's factors from its parts by path; an empty path is the whole. ValueError if they do not fit."""
        raise NotImplementedError

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        """The number of trained values for a layer whose weight has this shape."""
        raise NotImplementedError
