"""Collectives by NCCL: sums over one GPU a process, on the backend's stream, also inside a captured step."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .....errors import DeviceFault, EnvironmentFault
from ....dtype import Array, bfloat16


class NcclCollectives:
    """NCCL's communicator of `world` processes, of which this is `rank`."""

    captured = True

    def __init__(self, cupy: Any, stream: Any, rank: int, world: int, identifier: bytes) -> None:
        """Meets the others.

        Args:
            cupy: the package.
            stream: the backend's, on which sums run.
            rank, world: the number of this process, and how many there are.
            identifier: `unique_identifier()` of one of them.

        Raises:
            DeviceFault: NCCL could not join the processes.
        """
        self._cupy, self._stream, self._world = cupy, stream, world
        self._nccl = nccl_of(cupy)
        try:
            self._communicator = self._nccl.NcclCommunicator(world, identifier, rank)
        except self._nccl.NcclError as error:
            raise DeviceFault(
                f"rank {rank} could not join {world} GPUs by NCCL: {error}; two processes on one GPU need "
                "--collectives mpi; NCCL_DEBUG=INFO shows more"
            ) from error

    def all_reduce(self, array: Array) -> None:
        kind = self._nccl.NCCL_BFLOAT16 if array.dtype == bfloat16 else self._nccl.NCCL_FLOAT32
        pointer = array.data.ptr
        self._communicator.allReduce(pointer, pointer, array.size, kind, self._nccl.NCCL_SUM, self._stream.ptr)

    def all_gather(self, data: bytes) -> list[bytes]:
        lengths = self._gathered(np.array([len(data)], np.int64)).ravel()
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self._gathered(padded)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _gathered(self, host: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns (world, n), the arrays of all processes."""
        with self._stream:
            mine = self._cupy.asarray(host.view(np.uint8))
            all_of_them = self._cupy.empty((self._world, mine.size), np.uint8)
            self._communicator.allGather(
                mine.data.ptr, all_of_them.data.ptr, mine.size, self._nccl.NCCL_UINT8, self._stream.ptr
            )
            result: np.ndarray[Any, Any] = all_of_them.get(stream=self._stream).view(host.dtype)
        return result

    def abort(self, code: int) -> None:
        os._exit(code)


def nccl_of(cupy: Any) -> Any:
    """CuPy's NCCL. Raises EnvironmentFault where it is not there."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise EnvironmentFault(f"several GPUs need NCCL, which CuPy does not find ({error})") from error
    if not nccl.available:
        raise EnvironmentFault("several GPUs need NCCL, which CuPy does not find; pip install nvidia-nccl-cu13")
    return nccl


def unique_identifier(cupy: Any) -> bytes:
    """By which processes find each other. With NCCL_COMM_ID=HOST:PORT set, each process makes the same one."""
    return bytes(nccl_of(cupy).get_unique_id())
