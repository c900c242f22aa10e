"""Which of several processes this one is, read from the variables that launchers set. None of them is started here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flame_train.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A process among those that train together.

    Attributes:
        rank: its number, from 0.
        world: how many processes there are.
        local_rank: its number among those on this machine.
        local_world: how many are on this machine; 0: the launcher does not say.
        launcher: "mpi", "slurm", "torchrun", or "" for a process by itself.
        address: host and port at which NCCL meets, HOST:PORT; "" where MPI passes its identifier on.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class _Names:
    rank: str
    world: str
    local_rank: str
    local_world: str = ""


_TORCHRUN: Final = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI: Final = _Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MPICH: Final = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM: Final = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
"""A batch script that `srun` did not start has SLURM_PROCID too, but no tasks of a step."""

_DIGITS: Final = 18
_OFFSET: Final = 1
"""NCCL's port beside torchrun's MASTER_PORT, at which its agent listens."""

_PORTS: Final = range(20_000, 40_000)
"""From these NCCL's port is chosen by the numbers of Slurm's job and step."""


def read_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """The place of this process. Raises ConfigError for variables that contradict each other or are no numbers."""
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
    local_world = _number(environ, names.local_world) if names.local_world in environ else 0
    if not rank < world:
        raise ConfigError(
            f"{names.rank}={rank} is not below {names.world}={world}; start all processes by one launcher"
        )
    if world == 1:
        return RankInfo()
    return RankInfo(rank, world, local, local_world, launcher, address(environ) if callable(address) else "")


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) <= _DIGITS):
        shown = value if len(value) <= _DIGITS else f"{value[:_DIGITS]}..."
        raise ConfigError(f"expected a number in the environment variable {name}, got {shown!r}; the launcher sets it")
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
    """The first host of a list as Slurm writes it: `node[01-04,07],login` is node01."""
    head = re.match(r"(?P<name>[^,\[]+)(?:\[(?P<first>\d+)[^\]]*\](?P<rest>[^,\[]*))?", hosts)
    if head is None:
        raise ConfigError(f"expected a list of hosts in SLURM_STEP_NODELIST, got {hosts!r}")
    return head["name"] + (head["first"] or "") + (head["rest"] or "")
