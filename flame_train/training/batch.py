"""A batch on the host, and the device buffers it is copied into: one set for each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flame_train.engine import Tensor
from flame_train.engine.backend import Backend, Upload
from flame_train.engine.dtype import Array, DType, as_dtype, is_float

_NUMBERS = ("step", "samples")
HostArray = np.ndarray[Any, Any]
Signature = tuple[tuple[str, tuple[int, ...]], ...]

LATENTS = ("mean", "logvar")
"""The arrays of an example that are the image."""

LOSS_WEIGHT = "loss_weight"
"""The factors on the errors of an example, (h, w, 1) or (1, 1, 1)."""

TAUGHT = "taught"
"""(1, 1, 1): 1 where the base model's prediction is an example's target, 0 where its image is."""

FURTHER = "/"
"""Stands between the name of a further caption and that of an array of it; every other array is conditioning."""

_FP32 = (*LATENTS, LOSS_WEIGHT, TAUGHT)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One micro-batch: arrays (B, ...) by name, its place in the run, and the files it came from.

    `step` counts optimizer updates from 0. `samples` (B,) number the samples within the update, over all its
    micro-batches. So every random number of a run has a unique index. `sent` is the same batch on its way to the
    device, if it was sent ahead.
    """

    arrays: Mapping[str, HostArray]
    step: int
    samples: HostArray
    files: tuple[str, ...]
    sent: Upload | None = None

    @property
    def signature(self) -> Signature:
        """The names and shapes of the arrays, on which a captured step depends."""
        return tuple(sorted((name, tuple(a.shape)) for name, a in self.arrays.items()))


def device_arrays(host: HostBatch, dtype: DType) -> dict[str, HostArray]:
    """A batch as the device holds it: conditioning in the model's `dtype`, `step` and `samples` int64, others fp32."""
    arrays = {
        name: a.astype(dtype, copy=False) if is_float(a.dtype) and name not in _FP32 else a
        for name, a in host.arrays.items()
    }
    numbers = {"step": np.asarray(host.step, np.int64), "samples": host.samples.astype(np.int64, copy=False)}
    return arrays | numbers


def sender(backend: Backend, dtype: DType) -> Callable[[HostBatch], HostBatch]:
    """Sends batches ahead: the result is the batch with its upload."""
    uploader = backend.uploader()
    return lambda host: replace(host, sent=uploader.submit(device_arrays(host, dtype)))


class Batch:
    """Device buffers, at fixed addresses, for batches of one signature.

    `told` (2, B), fp32, is where a step writes each sample's loss and noise level, if anybody wants them.
    """

    def __init__(self, like: HostBatch, backend: Backend, dtype: DType | str, *, telling: bool = False) -> None:
        self._backend, self._dtype = backend, as_dtype(dtype)
        self.told: Array | None = backend.empty((2, len(like.samples)), as_dtype("fp32")) if telling else None
        self._arrays = {name: backend.empty(a.shape, a.dtype) for name, a in device_arrays(like, self._dtype).items()}

    @property
    def step(self) -> Array:
        """The number of the optimizer's update: 0-d int64."""
        return self._arrays["step"]

    @property
    def samples(self) -> Array:
        """The samples' numbers within the update: (B,) int64."""
        return self._arrays["samples"]

    @property
    def size(self) -> int:
        """The number of samples."""
        return int(self.samples.shape[0])

    def latents(self) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latents, fp32 (B, H, W, Z), unscaled."""
        mean, logvar = (Tensor(self._arrays[name]) for name in LATENTS)
        return mean, logvar

    def loss_weight(self) -> Tensor | None:
        """The factors on the errors, fp32 (B, h, w, 1) or (B, 1, 1, 1); None: all are 1."""
        found = self._arrays.get(LOSS_WEIGHT)
        return None if found is None else Tensor(found)

    def taught(self) -> Tensor | None:
        """Fp32 (B, 1, 1, 1), 1 for examples whose target is the base model's prediction; None: there are none."""
        found = self._arrays.get(TAUGHT)
        return None if found is None else Tensor(found)

    def conditioning(self, text: str = "") -> dict[str, Tensor]:
        """Everything else, by name, floats in the model's dtype; `text` names a further caption in the own's place."""
        plain = {name: a for name, a in self._arrays.items() if name not in (*_FP32, *_NUMBERS)}
        own = {name: Tensor(a) for name, a in plain.items() if FURTHER not in name}
        prefix = f"{text}{FURTHER}"
        return own | {name.removeprefix(prefix): Tensor(a) for name, a in plain.items() if name.startswith(prefix)}

    def fill(self, host: HostBatch) -> None:
        """Copies a batch of this signature into the buffers: from the device's memory, if it was sent ahead."""
        if host.sent is None:
            for name, array in device_arrays(host, self._dtype).items():
                self._backend.write(self._arrays[name], array)
        else:
            for name, array in host.sent.wait().items():
                self._arrays[name][...] = array
            host.sent.release()
