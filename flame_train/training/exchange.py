"""What processes that train together tell each other in each step, beside their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flame_train.distributed.group import ProcessGroup
from flame_train.engine.backend import Backend
from flame_train.engine.dtype import Array

FIELDS: Final = ("signal", "wait_ms", "memory", "loss")
"""What each process puts: the signal that it got, its wait for data, its peak bytes on the device so far, its loss."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedVector:
    """One vector that is summed over all processes: the loss, and a row for each process, which alone writes into it.

    So a stop that one process was asked for reaches all of them after the same step.

    Attributes:
        vector: fp32 (1 + 4 `world`,) on the device.
        mine: fp32, what this process puts, as long as `vector`; written by the host before each step.
        backend: the device.
        rank: the number of this process.
        world: how many there are.
    """

    vector: Array
    mine: Array
    backend: Backend
    rank: int
    world: int

    @classmethod
    def between(cls, group: ProcessGroup, backend: Backend) -> SharedVector | None:
        """For the processes of a group; None for one by itself."""
        if group.collectives is None:
            return None
        vector, mine = (backend.xp.zeros(1 + len(FIELDS) * group.world, np.float32) for _ in range(2))
        return cls(vector, mine, backend, group.rank, group.world)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `rows`, in order: signal_0, wait_ms_0, memory_0, loss_0, signal_1, ..."""
        return tuple(f"{name}_{rank}" for rank in range(self.world) for name in FIELDS)

    @property
    def rows(self) -> Array:
        """What each process put, after `reduce`."""
        return self.vector[1:]

    def put(self, signal_number: int, wait_ms: float, memory: int) -> None:
        """Sets the row of this process in this step."""
        row = np.zeros(self.mine.shape, np.float32)
        row[self._first : self._first + 3] = signal_number, wait_ms, memory
        self.backend.write(self.mine, row)

    def reduce(self, group: ProcessGroup, loss: Array) -> None:
        """Sums over all processes: the 0-d loss, in place, and the rows. Device work alone."""
        self.vector[...] = self.mine
        self.vector[0] = loss
        self.vector[self._first + 3] = loss
        group.all_reduce(self.vector)
        loss[...] = self.vector[0]

    @property
    def _first(self) -> int:
        return 1 + len(FIELDS) * self.rank
