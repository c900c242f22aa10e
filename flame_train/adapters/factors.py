"""Adapters as arrays: what every file format stores in its own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


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
    def arrays(self) -> Mapping[str, Array]:
        """Its arrays by name, to be checked for NaN."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Says whether the weight that it modifies may have this shape."""

    def delta(self, weight: Array, strength: float = 1.0) -> Array:
        """Returns the update of `weight`, fp32, in its shape, `strength` times as strong as it was trained."""


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """One module's pair of matrices: W' = W + strength * (alpha / rank) * up @ down.

    Linear: `down` [rank, in], `up` [out, rank]. Convolution: [rank, in, kh, kw] and [out, rank, 1, 1].
    """

    down: Array
    up: Array
    alpha: float

    @property
    def kind(self) -> str:
        return "lora"

    @property
    def arrays(self) -> Mapping[str, Array]:
        return {"down": self.down, "up": self.up}

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight it modifies."""
        return (int(self.up.shape[0]), *self.down.shape[1:])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Says whether they are equal, or one is a linear layer and the other the same as a 1x1 convolution."""
        mine, expected = self.weight_shape, tuple(shape)
        return mine == expected or (mine[:2] == expected[:2] and set(mine[2:] + expected[2:]) <= {1})

    def delta(self, weight: Array | None = None, strength: float = 1.0) -> Array:
        """strength * (alpha / rank) * up @ down in fp32, in the shape of the weight, whose values do not matter."""
        down = self.down.astype(np.float32).reshape(self.rank, -1)
        up = self.up.astype(np.float32).reshape(-1, self.rank)
        product: Array = np.float32(strength * self.scale) * (up @ down)
        return product.reshape(self.weight_shape)


LoraState = Mapping[str, Mapping[str, Any]]
"""Component ("unet", "text_encoder", ...) -> native module path -> factors."""
