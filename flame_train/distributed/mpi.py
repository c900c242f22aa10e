"""Collectives by MPI (`mpi4py`): on CPUs, and between processes that share a GPU. Buffers alone, nothing is pickled."""

from __future__ import annotations

from typing import Any

import numpy as np

from flame_train.engine.backend import Backend
from flame_train.engine.dtype import Array, bfloat16
from flame_train.errors import ConfigError, EnvironmentFault

from .environment import RankInfo


class MpiCollectives:
    """Sums in host memory. Arrays of a GPU are copied there and back, so no captured step can hold a sum."""

    captured = False

    def __init__(self, backend: Backend, mpi: Any) -> None:
        self._backend, self._mpi, self._world = backend, mpi, mpi.COMM_WORLD
        self._add_bf16 = mpi.Op.Create(_add_bf16, commute=False)  # so that the order of a sum is that of the ranks

    def all_reduce(self, array: Array) -> None:
        host = array if isinstance(array, np.ndarray) else self._backend.to_host(array)
        if host.dtype == bfloat16:  # MPI has no such numbers
            self._world.Allreduce(self._mpi.IN_PLACE, [host.view(np.uint16), self._mpi.UINT16_T], self._add_bf16)
        else:
            self._world.Allreduce(self._mpi.IN_PLACE, host)
        if host is not array:
            self._backend.write(array, host)

    def all_gather(self, data: bytes) -> list[bytes]:
        return all_gather(self._mpi, data)

    def abort(self, code: int) -> None:
        self._world.Abort(code)


def _add_bf16(mine: Any, sums: Any, datatype: Any) -> None:
    """`sums` += `mine`, both buffers of bf16; each sum is rounded to it."""
    into = np.frombuffer(sums, bfloat16)
    into += np.frombuffer(mine, bfloat16)


def all_gather(mpi: Any, data: bytes) -> list[bytes]:
    """The bytes of each process, by rank."""
    world = mpi.COMM_WORLD
    lengths = np.zeros(world.Get_size(), np.int64)
    world.Allgather(np.array([len(data)], np.int64), lengths)
    gathered = np.zeros(int(lengths.sum()), np.uint8)
    world.Allgatherv(np.frombuffer(data, np.uint8), (gathered, lengths))
    ends = np.cumsum(lengths)
    return [gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]


def started(place: RankInfo) -> Any:
    """`mpi4py.MPI`, started. Raises EnvironmentFault without it, ConfigError where it knows other processes."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: no MPI library
        raise EnvironmentFault(
            f"{place.world} processes need MPI, which does not load ({error}); pip install 'flame-train[multi]'"
        ) from error
    rank, world = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (rank, world) != (place.rank, place.world):
        raise ConfigError(
            f"the launcher started rank {place.rank} of {place.world}, but MPI says rank {rank} of {world}; start with "
            "the mpirun of the MPI that mpi4py was installed with"
        )
    return MPI
