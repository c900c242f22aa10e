"""Parameters of one shape as one array, for rules that look at whole matrices: a few kernels do for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backend import Backend
from ..dtype import Array
from ..namespace import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """All parameters of a shape. `places` (n, 1), on the device, says where each begins in the flat buffers."""

    shape: tuple[int, ...]
    places: Array

    def gather(self, xp: Namespace, flat: Array) -> Array:
        """Their part of a flat buffer, (n, *shape); a copy."""
        return flat[self._elements(xp)].reshape(-1, *self.shape)

    def scatter(self, xp: Namespace, flat: Array, values: Array) -> None:
        """Writes (n, *shape) to their places in a flat buffer."""
        flat[self._elements(xp)] = values.reshape(values.shape[0], -1)

    def _elements(self, xp: Namespace) -> Array:
        return self.places + xp.arange(math.prod(self.shape), dtype=np.int64)


def stacks_of(segments: Sequence[tuple[tuple[int, ...], int]], backend: Backend) -> tuple[Stack, ...]:
    """The stacks of parameters, each given by its shape and its start, in the order in which shapes come first."""
    starts: dict[tuple[int, ...], list[int]] = {}
    for shape, start in segments:
        starts.setdefault(shape, []).append(start)
    return tuple(
        Stack(shape, backend.to_device(np.array(found, np.int64).reshape(-1, 1))) for shape, found in starts.items()
    )
