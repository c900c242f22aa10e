"""What a timestep sampling is to an objective: how noise levels are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from flame_train.diffusion.streams import Stream as Stream
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import Array
from flame_train.engine.random import Rng
from flame_train.settings import Entry


class TimestepSampling(Entry):
    """One distribution of noise levels: its fields are keys of `[loss]`."""

    exact: ClassVar[bool] = False
    """Whether its levels are what the network is told, so that neither shift nor least and greatest apply."""

    even: ClassVar[bool] = False
    """Whether it draws every timestep of a noise schedule alike."""

    def levels(self, rng: Rng) -> Array:
        """(B,) in (0, 1): noise levels of a flow before the shift, 1 being pure noise."""
        raise NotImplementedError

    def on(self, device: str) -> Callable[[Rng], Array]:
        """What draws levels on a device. It may hold tables there, which a captured step could not bring."""
        return self.levels


def table_on(device: str, values: np.ndarray[Any, Any]) -> Array:
    """fp32 numbers on a device, for `TimestepSampling.on`."""
    return get_backend(device).to_device(values.astype(np.float32))
