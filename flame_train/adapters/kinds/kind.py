"""The interface of an adapter kind, for training and for files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from flame_train.adapters.dropping import Drop
from flame_train.adapters.qkv_split import Paths
from flame_train.engine import Parameter, Tensor, nn, no_grad
from flame_train.engine.nn.layers import LayerAdapter
from flame_train.settings import Entry

Layer = nn.Linear | nn.Conv2d
HostArray = np.ndarray[Any, Any]
_LARGEST: Final = float(np.finfo(np.float32).max)


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

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the weight that it modifies may have this shape."""

    def delta(self, weight: HostArray, strength: float = 1.0) -> HostArray:
        """The update of `weight`, fp32, in its shape, `strength` times as strong as it was trained."""


class Adapter(LayerAdapter, Protocol):
    """A layer's adapter, sitting in the layer's `adapter` slot. The engine's protocol says how a layer calls it."""

    def parameters(self) -> Mapping[str, Parameter]:
        """The trained matrices by the names that follow the layer's, such as `lora_down.weight`."""

    def delta(self) -> Tensor:
        """The update of the weight, fp32, in its shape."""

    def factors(self) -> Factors:
        """The present values on the host."""

    def dropped(self, layer: Layer, x: Tensor, drop: Drop) -> Tensor:
        """The layer's output with the parts of the update that `drop` leaves in."""

    def on(self, layer: Layer) -> Adapter:
        """The same trained matrices as the adapter of a layer of another network, whose weight may differ."""

    def limit(self, max_norm: float) -> None:
        """Makes the update smaller, in place, where its Frobenius norm is above `max_norm`; on the device."""


class Make(Protocol):
    """Makes a parameter: an arena may place it."""

    def __call__(self, name: str, values: HostArray, device: str) -> Parameter:
        """The parameter `name` of fp32 `values` on the host."""


class AdapterKind(Entry):
    """One kind of adapter: its fields are further keys of `[lora]`."""

    ends: ClassVar[Mapping[str, str]]
    """How its tensors' names end in files, in every dialect, and which array of `Factors` each is."""

    inner: ClassVar[tuple[str, ...]] = ()
    """Of these arrays, the first that is there has the rank as its first size."""

    has_dropout: ClassVar[bool] = False
    """Whether it has inner activations, of which `lora.dropout` zeroes some."""

    faster: ClassVar[str] = ""
    """How the names of the parameters end that LoRA+ trains at a higher rate; empty: none."""

    def misfit(self, shapes: Mapping[str, tuple[int, ...]], rank: int) -> tuple[str, str] | None:
        """A key and what is wrong with it for layers whose weights have these shapes, by name; None if nothing is."""
        return None

    def sizes(self, weight_shape: tuple[int, ...], rank: int, alpha: float) -> tuple[int, float]:
        """Rank and alpha on a layer whose weight has this shape."""
        return rank, alpha

    def misfit_of_format(self, form: str) -> str:
        """Why a file in `form`, "kohya" or "diffusers", cannot hold it, and what to do; nothing if it can."""
        return ""

    def network_args(self, factors: Any) -> Mapping[str, str]:
        """What a file's `ss_network_args` say of it; with an "algo" the file is of LyCORIS' kinds."""
        return {}

    def create(self, layer: Layer, name: str, rank: int, alpha: float, seed: int, make: Make) -> Adapter:
        """Makes a new adapter that does not change the layer's output.

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
            layer, name, make: as in `create`.
            factors: the arrays of this layer in the file.
            strength: factor of the update; 1 is as trained.

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
        """Its tensors as diffusers' files have them, by path and by what follows it, with the factors of that part.

        ValueError, saying what it is, for one that diffusers does not read.
        """
        raise ValueError(f'an adapter of kind "{factors.kind}", which diffusers does not read')

    def with_alpha(self, factors: Any, alpha: float) -> Any:
        """The same update with another alpha, as `factors` where diffusers does not read the kind."""
        return factors

    def fault(self, slots: Mapping[str, HostArray]) -> str:
        """The problems of a module's arrays, by the names of `ends`; empty if they fit together."""
        raise NotImplementedError

    def read(self, slots: Mapping[str, HostArray], folded: float | None, scale: float) -> Factors:
        """The factors of arrays without fault.

        `folded` is the alpha before folding, as the file's metadata says; `scale` is the one of its configuration.
        An alpha among the arrays overrides `scale`. The update is the same for any `folded`.
        """
        raise NotImplementedError

    def join(self, parts: Mapping[str, Any], paths: Paths) -> Factors:
        """A module's factors from its parts by path; an empty path is the whole. ValueError if they do not fit."""
        raise NotImplementedError

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        """The number of trained values for a layer whose weight has this shape."""
        raise NotImplementedError


def generator(seed: int, name: str) -> np.random.Generator:
    """What a layer's first values are drawn from: which other layers take part does not matter."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def alpha_of(slots: Mapping[str, HostArray], rank: int) -> tuple[float, str]:
    """The alpha among a module's arrays, or its rank, and what is wrong with it."""
    if "alpha" not in slots:
        return float(rank), ""
    alpha = slots["alpha"]
    if alpha.size != 1 or not abs(float(alpha.reshape(()))) <= _LARGEST:
        return float(rank), "has an alpha that is not one finite number"
    return float(alpha.reshape(())), ""


def alpha_tensor(alpha: float, dtype: np.dtype[Any]) -> HostArray:
    """A scalar in the weights' dtype, as other writers have it, or in fp32 where that would change it."""
    with np.errstate(over="ignore"):
        own = np.array(alpha, dtype)
    return own if float(own) == alpha else np.array(alpha, np.float32)


def kohya_only(kind: str, form: str) -> str:
    """Why a file in `form` cannot hold a kind that diffusers does not read."""
    return "" if form == "kohya" else f'expected "kohya" with {kind}, which diffusers does not read, got "{form}"'


def unjoined(kind: str, parts: Mapping[str, Any]) -> Any:
    """The factors of a whole module. ValueError for parts of one: no sum of them is of this kind."""
    if "" not in parts:
        raise ValueError(f"a {kind} of parts of a layer has no {kind} of the whole")
    return parts[""]


def shrink(norm: Tensor, max_norm: float, factors: Sequence[Parameter]) -> None:
    """Multiplies `factors`, of which the update is a product, so that its norm is at most `max_norm`; sd-scripts'."""
    with no_grad():
        floored = norm.clamp(max_norm / 2)
        ratio = (floored.clamp(None, max_norm) / floored) ** (1.0 / len(factors))
        for p in factors:
            p.data[...] = (p.detach() * ratio).data
