"""Joins the processes that a launcher started: each gets its GPU, and the transport that they add up gradients by."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any, Final

from flame_train.engine.backend import get_backend, gpu_count
from flame_train.errors import ConfigError

from .environment import RankInfo, read_rank_info
from .group import ALONE, Collectives, ProcessGroup
from .mpi import MpiCollectives, all_gather, started

TRANSPORTS: Final = ("auto", "nccl", "mpi")
_LOG = logging.getLogger("flame_train")


def join(
    device: str, transport: str = "auto", environ: MutableMapping[str, str] = os.environ
) -> tuple[ProcessGroup, str]:
    """The group of this process and its device. A process that no launcher started is alone.

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
    """The device of a process. Where the launcher shows it one GPU, that one. Raises ConfigError for too few GPUs.

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
    return MpiCollectives(get_backend(device), started(place))


def _nccl(place: RankInfo, device: str, environ: MutableMapping[str, str]) -> Collectives:
    backend: Any = get_backend(device)
    if place.launcher != "mpi":
        environ.setdefault("NCCL_COMM_ID", place.address)
        identifier = backend.nccl_identifier()
    else:
        identifier = all_gather(started(place), b"" if place.rank else backend.nccl_identifier())[0]
    joined: Collectives = backend.nccl(place.rank, place.world, identifier)
    return joined
