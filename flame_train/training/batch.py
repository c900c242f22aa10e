"""A batch on the host, and the device buffers it is copied into: one set for each shape, at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.engine import Tensor
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import DType, as_dtype, is_float

HostArray = np.ndarray[Any, Any]
Signature = tuple[tuple[str, tuple[int, ...]], ...]

LATENTS = ("mean", "logvar")
"""The arrays of an example that are the picture; every other one is conditioning."""


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One micro-batch: arrays (B, ...) by name, its place in the run, and the files it came from.

    `step` counts optimizer updates from 0. `samples` (B,) number the samples within the update, over all its
    micro-batches, so that every random draw of a run has a name of its own.
    """

    arrays: Mapping[str, HostArray]
    step: int
    samples: HostArray
    files: tuple[str, ...]

    @property
    def signature(self) -> Signature:
        """What a captured step depends on: the names and shapes of the arrays."""
        return tuple(sorted((name, tuple(a.shape)) for name, a in self.arrays.items()))


class Batch:
    """Device buffers for batches of one signature. `fill` copies a host batch into them."""

    def __init__(self, like: HostBatch, backend: Backend, dtype: DType | str) -> None:
        self._backend = backend
        low = as_dtype(dtype)
        self._arrays = {
            name: backend.empty(a.shape, low if is_float(a.dtype) and name not in LATENTS else a.dtype)
            for name, a in like.arrays.items()
        }
        self.step = backend.empty((), np.dtype(np.int64))
        self.samples = backend.empty(like.samples.shape, np.dtype(np.int64))

    @property
    def size(self) -> int:
        """The number of samples."""
        return int(self.samples.shape[0])

    def latents(self) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latents, fp32 (B, H, W, Z), unscaled."""
        mean, logvar = (Tensor(self._arrays[name]) for name in LATENTS)
        return mean, logvar

    def conditioning(self) -> dict[str, Tensor]:
        """Everything else, by name; floats in the model's dtype."""
        return {name: Tensor(a) for name, a in self._arrays.items() if name not in LATENTS}

    def fill(self, host: HostBatch) -> None:
        """Copies a batch of this signature into the buffers."""
        for name, target in self._arrays.items():
            self._backend.write(target, host.arrays[name].astype(target.dtype, copy=False))
        self._backend.write(self.step, np.asarray(host.step, np.int64))
        self._backend.write(self.samples, host.samples.astype(np.int64, copy=False))
