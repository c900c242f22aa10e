"""Joins the processes that a launcher started: each gets its GPU, and the transport that they add up gradients by.

Variables that launchers set say which process this is. MPI (`mpi4py`) adds up on CPUs, and between processes that
share a GPU: buffers alone, nothing is pickled.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flame_train.engine.backend import Backend, get_backend, gpu_count
from flame_train.engine.dtype import Array, bfloat16
from flame_train.errors import ConfigError, EnvironmentFault

from .group import ALONE, Collectives, ProcessGroup

_LOG = logging.getLogger("flame_train")


def join(
    device: str, transport: str = "auto", environ: MutableMapping[str, str] = os.environ
) -> tuple[ProcessGroup, str]:
    """Returns the group of this process and its device. A process that no launcher started is alone.

    Args:
        device: "cpu" or "cuda"; with several processes each takes the GPU of its number on its machine.
        transport: "nccl" or "mpi"; "auto" is NCCL on GPUs and MPI on CPUs.
        environ: the environment. NCCL_COMM_ID is set in it where NCCL's processes meet without MPI.

    Raises:
        ConfigError: the variables make no sense, the device is not to choose, or there are too few GPUs.
        EnvironmentFault: MPI or NCCL is not there.
        DeviceFault: NCCL could not join the processes.
    """
    place = read_rank_info(environ)
    if place.world == 1:
        return ALONE, device
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"expected --device cuda or cpu with {place.world} processes, got {device!r}: each takes its own GPU"
        )
    if device == "cpu" and transport == "nccl":
        raise ConfigError("--collectives nccl needs GPUs; leave it out, or use --device cuda")
    by_mpi = transport == "mpi" or device == "cpu"
    chosen = device if device == "cpu" else own_gpu(place, gpu_count(), shared=by_mpi)
    if place.rank:  # rank 0 says what there is to say
        _LOG.setLevel(logging.ERROR)
    collectives = _mpi(place, chosen) if by_mpi else _nccl(place, chosen, environ)
    return ProcessGroup(place.rank, place.world, collectives), chosen


def own_gpu(place: RankInfo, visible: int, shared: bool) -> str:
    """Returns the device of a process. Where the launcher shows it one GPU, that one. Raises ConfigError for too few
    GPUs.

    Args:
        place: the process.
        visible: how many GPUs it can see.
        shared: whether processes may share a GPU.
    """
    if visible > 1 and place.local_rank >= visible and not shared:
        raise ConfigError(
            f"rank {place.rank} is number {place.local_rank} on its machine, which has {visible} GPUs, counted from 0; "
            f"start at most {visible} processes there"
        )
    index = place.local_rank % max(visible, 1)
    return f"cuda:{index}" if index else "cuda"


def _mpi(place: RankInfo, device: str) -> Collectives:
    if place.launcher != "mpi":
        raise ConfigError(
            f"{place.world} processes by {place.launcher} without MPI add up gradients by NCCL, on GPUs; "
            "start them by mpirun for --device cpu or --collectives mpi"
        )
    return MpiCollectives(get_backend(device), start_mpi(place))


def _nccl(place: RankInfo, device: str, environ: MutableMapping[str, str]) -> Collectives:
    backend: Any = get_backend(device)
    if place.launcher != "mpi":
        environ.setdefault("NCCL_COMM_ID", place.address)
        identifier = backend.nccl_identifier()
    else:
        identifier = all_gather(start_mpi(place), b"" if place.rank else backend.nccl_identifier())[0]
    joined: Collectives = backend.nccl(place.rank, place.world, identifier)
    return joined


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A process among those that train together.

    Attributes:
        rank: its number, from 0.
        world: how many processes there are.
        local_rank: its number among those on this machine.
        launcher: "mpi", "slurm", "torchrun", or "" for a process by itself.
        address: host and port at which NCCL meets, HOST:PORT; "" where MPI passes its identifier on.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    launcher: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class _Names:
    rank: str
    world: str
    local_rank: str


_TORCHRUN: Final = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI: Final = _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_MPICH: Final = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
_SLURM: Final = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
"""A batch script that `srun` did not start has SLURM_PROCID too, but no tasks of a step."""

_DIGITS: Final = 18
_OFFSET: Final = 1
"""NCCL's port beside torchrun's MASTER_PORT, at which its agent listens."""

_PORTS: Final = range(20_000, 40_000)
"""From these NCCL's port is chosen by the numbers of Slurm's job and step."""


def read_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Reads the place of this process. Raises ConfigError for variables that contradict each other, or no numbers."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _place(environ, _TORCHRUN, "torchrun", _torchrun_address)
    if _OPEN_MPI.rank in environ:
        return _place(environ, _OPEN_MPI, "mpi")
    if "SLURM_STEP_NUM_TASKS" in environ and _SLURM.rank in environ:
        launcher = "mpi" if "PMIX_RANK" in environ or _MPICH.rank in environ else "slurm"
        return _place(environ, _SLURM, launcher, None if launcher == "mpi" else _slurm_address)
    if _MPICH.rank in environ:
        return _place(environ, _MPICH, "mpi")
    return RankInfo()


def _place(environ: Mapping[str, str], names: _Names, launcher: str, address: object = None) -> RankInfo:
    rank, world = _number(environ, names.rank), _number(environ, names.world)
    local = _number(environ, names.local_rank) if names.local_rank in environ else rank
    if not rank < world:
        raise ConfigError(
            f"{names.rank}={rank} is not below {names.world}={world}; start all processes by one launcher"
        )
    if world == 1:
        return RankInfo()
    return RankInfo(rank, world, local, launcher, address(environ) if callable(address) else "")


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) <= _DIGITS):
        excerpt = value if len(value) <= _DIGITS else f"{value[:_DIGITS]}..."
        raise ConfigError(
            f"expected a number in the environment variable {name}, got {excerpt!r}; the launcher sets it"
        )
    return int(value)


def _torchrun_address(environ: Mapping[str, str]) -> str:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ConfigError(f"RANK and WORLD_SIZE are set but {name} is not; torchrun sets all of them")
    return f"{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT') + _OFFSET}"


def _slurm_address(environ: Mapping[str, str]) -> str:
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not hosts:
        raise ConfigError("SLURM_PROCID is set but SLURM_STEP_NODELIST is not; start the processes by srun")
    numbers = [_number(environ, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in environ]
    return f"{first_host(hosts)}:{_PORTS[sum(numbers) % len(_PORTS)]}"


def first_host(hosts: str) -> str:
    """Returns the first host of a list as Slurm writes it: `node[01-04,07],login` is node01."""
    head = re.match(r"(?P<name>[^,\[]+)(?:\[(?P<first>\d+)[^\]]*\](?P<rest>[^,\[]*))?", hosts)
    if head is None:
        raise ConfigError(f"expected a list of hosts in SLURM_STEP_NODELIST, got {hosts!r}")
    return head["name"] + (head["first"] or "") + (head["rest"] or "")


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
    """Adds `mine` to `sums`, both buffers of bf16; each sum is rounded to it."""
    into = np.frombuffer(sums, bfloat16)
    into += np.frombuffer(mine, bfloat16)


def all_gather(mpi: Any, data: bytes) -> list[bytes]:
    """Returns the bytes of each process, by rank."""
    world = mpi.COMM_WORLD
    lengths = np.zeros(world.Get_size(), np.int64)
    world.Allgather(np.array([len(data)], np.int64), lengths)
    gathered = np.zeros(int(lengths.sum()), np.uint8)
    world.Allgatherv(np.frombuffer(data, np.uint8), (gathered, lengths))
    ends = np.cumsum(lengths)
    return [gathered[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]


def start_mpi(place: RankInfo) -> Any:
    """Starts `mpi4py.MPI`. Raises EnvironmentFault without it, ConfigError where it knows other processes."""
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
