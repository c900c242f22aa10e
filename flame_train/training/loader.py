"""Batches for the loop, read from the cache one batch ahead, on a separate thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np

from flame_train.data.order import BatchSchedule
from flame_train.data.padding import NO_PADDINGS, Paddings, collate
from flame_train.distributed.group import ALONE, ProcessGroup

from .batch import TAUGHT, HostBatch

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
        """The next micro-batch. `wait_ms` is then how long the loop stood still for it."""
        begin = time.monotonic()
        batch = self._ahead.result()
        self.wait_ms = (time.monotonic() - begin) * 1e3
        self._next += 1
        self._ahead = self._thread.submit(self._make, self._next)
        return batch

    def epoch(self, micro: int) -> float:
        """How many epochs have passed before micro-batch `micro`."""
        return micro * self._group.world / self._order.batches_per_epoch

    def _make(self, micro: int) -> HostBatch:
        place = micro * self._group.world + self._group.rank
        planned = self._order.batch_at(place)
        epoch = self._order.epoch_of(place)
        examples = [self._example(epoch, i, draw) for i, draw in zip(planned.indices, planned.draws, strict=True)]
        step, within = divmod(place, self._accumulation * self._group.world)
        size = len(examples)
        arrays = collate(examples, self._paddings)
        if TAUGHT in arrays and not arrays[TAUGHT].any():
            del arrays[TAUGHT]  # a step of another shape, which does not ask the base model
        batch = HostBatch(
            arrays=arrays,
            step=step,
            samples=np.arange(size) + within * self._order.largest_batch,
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
