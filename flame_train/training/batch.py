"""Batches: read ahead by threads, put together on the host, and copied into device buffers, one set for each shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from flame_train.data.order import BatchSchedule
from flame_train.data.padding import NO_PADDINGS, Paddings, collate
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine import Tensor
from flame_train.engine.backend import Backend, Upload
from flame_train.engine.dtype import Array, DType, as_dtype, is_float

_NUMBERS = ("step", "samples")
HostArray = np.ndarray[Any, Any]
Signature = tuple[tuple[str, tuple[int, ...]], ...]

LATENTS = ("mean", "logvar")
"""The arrays of an example that are the image."""

LOSS_WEIGHT = "loss_weight"
"""The factors on the errors of an example, (h, w, 1) or (1, 1, 1), with frames (1, h, w, 1) or (1, 1, 1, 1)."""

BASE_IS_TARGET = "taught"
"""(1, 1, 1): 1 where the base model's prediction is an example's target, 0 where its image is."""

EXTRA_CAPTION = "/"
"""Stands between the name of a further caption and that of an array of it; every other array is conditioning."""

_FP32 = (*LATENTS, LOSS_WEIGHT, BASE_IS_TARGET)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One micro-batch: arrays (B, ...) by name, its place in the run, and the files it came from.

    `step` counts optimizer updates from 0. `samples` (B,) number the samples within the update, over all its
    micro-batches; those of a group have one number. So every random number of a run has a unique index. `sent` is the
    same batch on its way to the device, if it was sent ahead.
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
    """Casts a batch as the device holds it: conditioning in `dtype`, `step` and `samples` int64, others fp32."""
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

    `per_image_loss` (2, B), fp32, is where a step writes each sample's loss and noise level, if anybody wants them.
    """

    def __init__(self, like: HostBatch, backend: Backend, dtype: DType | str, *, telling: bool = False) -> None:
        self._backend, self._dtype = backend, as_dtype(dtype)
        self.per_image_loss: Array | None = backend.empty((2, len(like.samples)), as_dtype("fp32")) if telling else None
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
        """Returns mean and log variance of the latents, fp32 (B, H, W, Z) or (B, F, H, W, Z), unscaled."""
        mean, logvar = (Tensor(self._arrays[name]) for name in LATENTS)
        return mean, logvar

    def loss_weight(self) -> Tensor | None:
        """Returns the factors on the errors, fp32, of shapes that go with latents; None: all are 1."""
        array = self._arrays.get(LOSS_WEIGHT)
        return None if array is None else Tensor(array)

    def base_is_target(self) -> Tensor | None:
        """Returns 1 for examples whose target is the base model's prediction, fp32, of as many axes as latents.

        None: there are none.
        """
        array = self._arrays.get(BASE_IS_TARGET)
        axes = self._arrays[LATENTS[0]].ndim
        return None if array is None else Tensor(array.reshape(-1, *[1] * (axes - 1)))

    def conditioning(self, text: str = "") -> dict[str, Tensor]:
        """Gives all else by name, floats in the model's dtype; `text` names a further caption in the own's place."""
        plain = {name: a for name, a in self._arrays.items() if name not in (*_FP32, *_NUMBERS)}
        tensors = {name: Tensor(a) for name, a in plain.items() if EXTRA_CAPTION not in name}
        prefix = f"{text}{EXTRA_CAPTION}"
        return tensors | {name.removeprefix(prefix): Tensor(a) for name, a in plain.items() if name.startswith(prefix)}

    def fill(self, host: HostBatch) -> None:
        """Copies a batch of this signature into the buffers: from the device's memory, if it was sent ahead."""
        if host.sent is None:
            for name, array in device_arrays(host, self._dtype).items():
                self._backend.write(self._arrays[name], array)
        else:
            for name, array in host.sent.wait().items():
                self._arrays[name][...] = array
            host.sent.release()


Example = dict[str, np.ndarray[Any, Any]]
MakeExample = Callable[[int, int, int], Example]
"""(epoch, sample, how many-th coming of it in the epoch, from 0) -> its arrays."""


class Loader:
    """Loads micro-batches from number `first` on, one ahead, in a thread.

    Micro-batch m belongs to update m // accumulation. Order and examples are functions of (seed, epoch). So a
    loader that starts at m gives what an uninterrupted run has there. Of N ranks, micro-batch m of rank r is number
    m N + r of the common order. So N ranks see in a step what one rank sees with N times the accumulation.

    Args:
        order: the batches by step.
        example: gives the arrays of a sample at one of its repeats.
        names: the names of the items, for messages.
        first: number of the first micro-batch.
        accumulation: micro-batches in one update.
        send: starts the upload of a batch, on the loader's thread.
        group: the processes that train together.
        paddings: how arrays of different lengths are filled up.
    """

    def __init__(
        self,
        order: BatchSchedule,
        example: MakeExample,
        names: Sequence[str],
        *,
        first: int,
        accumulation: int,
        send: Callable[[HostBatch], HostBatch] | None = None,
        group: ProcessGroup = ALONE,
        paddings: Paddings = NO_PADDINGS,
    ) -> None:
        self._order, self._example, self._names = order, example, names
        self._accumulation, self._send, self._group, self._paddings = accumulation, send, group, paddings
        self._next = first
        self._thread = ThreadPoolExecutor(1, "flame-train-loader")
        self._ahead: Future[HostBatch] = self._thread.submit(self._make, first)
        self.wait_ms = 0.0

    def take(self) -> HostBatch:
        """Returns the next micro-batch. `wait_ms` is then how long the loop stood still for it."""
        begin = time.monotonic()
        batch = self._ahead.result()
        self.wait_ms = (time.monotonic() - begin) * 1e3
        self._next += 1
        self._ahead = self._thread.submit(self._make, self._next)
        return batch

    def epoch(self, micro: int) -> float:
        """Returns how many epochs have passed before micro-batch `micro`."""
        return micro * self._group.world / self._order.batches_per_epoch

    def _make(self, micro: int) -> HostBatch:
        place = micro * self._group.world + self._group.rank
        planned = self._order.batch_at(place)
        epoch = self._order.epoch_of(place)
        examples = [self._example(epoch, i, draw) for i, draw in zip(planned.indices, planned.draws, strict=True)]
        step, within = divmod(place, self._accumulation * self._group.world)
        size = len(examples)
        arrays = collate(examples, self._paddings)
        if BASE_IS_TARGET in arrays and not arrays[BASE_IS_TARGET].any():
            del arrays[BASE_IS_TARGET]  # a step of another shape, which does not ask the base model
        batch = HostBatch(
            arrays=arrays,
            step=step,
            samples=np.arange(size) // self._order.group + within * self._order.largest_batch,
            files=tuple(self._names[i] for i in planned.indices),
        )
        return self._send(batch) if self._send else batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.cancel()
        self._thread.shutdown(wait=True)
