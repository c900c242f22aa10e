"""Distributions of noise levels that a config can choose: each is a class in a file of this folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from flame_train.diffusion.random_streams import Stream as Stream
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng
from flame_train.settings import Entry, Table, entries_in


class TimestepSampling(Entry):
    """One distribution of noise levels: its fields are keys of `[loss]`."""

    exact: ClassVar[bool] = False
    """Whether the network gets its levels as they are: then neither the shift nor the bounds apply."""

    even: ClassVar[bool] = False
    """Whether every timestep of a noise schedule is equally likely."""

    @abstractmethod
    def levels(self, rng: Rng) -> Array:
        """Returns (B,) in (0, 1): noise levels of a flow before the shift, 1 being pure noise."""

    def on(self, device: str) -> Callable[[Rng], Array]:
        """Samples levels on a device. It may hold tables there, which a captured step could not bring."""
        return self.levels


def table_on(device: str, values: np.ndarray[Any, Any]) -> Array:
    """Returns fp32 numbers on a device, for `TimestepSampling.on`."""
    return get_backend(device).to_device(values.astype(np.float32))


TIMESTEP_SAMPLINGS: Table[TimestepSampling] = Table(
    "timestep_sampling",
    "how noise levels are drawn; auto: the family's own",
    entries_in(__name__, TimestepSampling),
    "auto",
    aka=("timesteps", "timestep_type", "weighting_scheme"),
)
