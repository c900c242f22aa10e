"""Host memory of which the processes of one machine map the same pages: what all of them keep is there once.

It is an anonymous file (`memfd_create`), which takes nothing of /dev/shm and is gone with the last process, killed or
not. The others open it below /proc of the process that made it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import socket
import struct
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import psutil

from flame_train.engine.dtype import HostBytes
from flame_train.engine.mode import keeping_in
from flame_train.errors import DeviceFault, FlameError, OtherRankFailed, exit_status

from .group import ProcessGroup

_LOG = logging.getLogger(__name__)
_POSIX: Any = os  # with calls that Windows has not: there `_File.make` raises before any of them

_SLOT: Final = 4096
"""Bytes of each process at the beginning of the memory.

The first cell says how often it wrote all, those after it up to where; `_FAILED`: an error ended it, which lies behind.
"""
_CELL: Final = struct.Struct("<q")
_FAILED: Final = -1
_TEXT: Final = 1024  # where in the slot the error is
_EXCERPT: Final = 400  # characters of it, of up to 6 bytes each
_LOOK: Final = 0.005  # seconds between two looks at what the others came to
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def keeping_once(group: ProcessGroup, wanted: bool = True, takes_part: bool = True) -> AbstractContextManager[object]:
    """Returns a context in which arrays that wait on the host for good are kept once for all processes of a machine.

    All processes of the group call it where something waits at all. Those that take part load the same inside. The
    context lies within a barrier: the others hear of an error first. Where processes of a machine cannot map the same
    memory each keeps its own, and the log says so.

    Args:
        wanted: whether anything is to wait, the same in all processes.
        takes_part: whether this process loads it.
    """
    if group.collectives is None or not wanted:
        return nullcontext()
    met = _meet(group, takes_part)
    for fault in dict.fromkeys(met.faults) if group.leads else ():
        _LOG.warning("each process keeps its own copy of the weights that wait in host memory: %s", fault)
    if met.file is None:
        return nullcontext()
    return LocalMemory(met.file, met.ranks, group)


def copies_kept(group: ProcessGroup) -> int:
    """Returns how often this machine keeps what all its processes load: once, or as often as it has processes.

    All processes of the group call it.
    """
    if group.collectives is None:
        return 1
    met = _meet(group, True)
    if met.file is not None:
        met.file.close()
        return 1
    return len(met.ranks)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What came of a meeting of all processes.

    Attributes:
        ranks: those of this machine that take part.
        file: what they share; None: nothing, as there is one, or they cannot.
        faults: why processes of any machine cannot.
    """

    ranks: tuple[int, ...]
    file: _File | None
    faults: tuple[str, ...]


def _meet(group: ProcessGroup, takes_part: bool) -> _Meeting:
    """Has the processes of each machine open the file that the first of them makes."""
    made, opened, fault = None, None, ""
    try:
        made = _File.make() if takes_part else None
    except OSError as error:
        fault = str(error)
    mine = {"host": _host() if takes_part else "", "address": made and made.address}
    said = [json.loads(text) for text in group.all_gather(json.dumps(mine))]
    ranks = tuple(rank for rank, each in enumerate(said) if takes_part and each["host"] == mine["host"])
    if len(ranks) > 1 and not fault:
        try:
            opened = _File.open(said[ranks[0]]["address"])
        except (OSError, TypeError) as error:  # the latter: the first one made none
            fault = str(error)
    faults = group.all_gather(fault if len(ranks) > 1 else "")
    if made is not None:
        made.close()
    if opened is not None and any(faults[rank] for rank in ranks):
        opened.close()
        opened = None
    return _Meeting(ranks, opened, tuple(filter(None, faults)))


def _host() -> str:
    """Returns what processes of one machine have in common, and no others."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text()
    return socket.gethostname()


class _File:
    """An anonymous file in memory, as large as the machine's and empty: pages are there once they are written."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self.descriptor, self._nonce = descriptor, nonce

    @classmethod
    def make(cls) -> _File:
        """Raises OSError where the system has none."""
        create: Any = getattr(os, "memfd_create", None)
        if create is None:
            raise OSError(errno.ENOSYS, "this system has no anonymous files (memfd_create)")
        made = cls(create("flame-train"), uuid.uuid4().hex)
        os.ftruncate(made.descriptor, _pages(psutil.virtual_memory().total))
        _POSIX.pwrite(made.descriptor, made._nonce.encode(), 0)
        return made

    @property
    def address(self) -> list[str]:
        """What `open` takes."""
        return [f"/proc/{os.getpid()}/fd/{self.descriptor}", self._nonce]

    @classmethod
    def open(cls, address: Sequence[str]) -> _File:
        """Opens one that another process made, by its `address`. Raises OSError where there is none."""
        path, nonce = address
        found = cls(os.open(path, os.O_RDWR), nonce)
        if _POSIX.pread(found.descriptor, len(nonce), 0) != nonce.encode():
            found.close()
            raise FileNotFoundError(errno.ENOENT, "another file is there", path)
        return found

    def close(self) -> None:
        os.close(self.descriptor)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class LocalMemory:
    """See `mode.SharedMemory`; a context in which it is where arrays are kept.

    Args:
        file: which all of them have open; it is closed here.
        ranks: the processes that share it.
        group: all processes.
    """

    def __init__(self, file: _File, ranks: Sequence[int], group: ProcessGroup) -> None:
        self._file, self._ranks, self._group = file, ranks, group
        self.number, self.count = ranks.index(group.rank), len(ranks)
        self._map = mmap.mmap(file.descriptor, os.fstat(file.descriptor).st_size)
        self._end = _pages((1 + self.count) * _SLOT)  # the first one has the file's mark
        self._completed = 0
        self._inside = ExitStack()

    def __enter__(self) -> Self:
        self._inside.enter_context(keeping_in(self))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside.close()
        self._file.close()
        if error is not None:
            shown = str(error) if isinstance(error, FlameError) else f"{type(error).__name__}: {error}"
            raw = json.dumps([exit_status(error), shown[:_EXCERPT]]).encode()
            begin = (1 + self.number) * _SLOT + _TEXT
            self._map[begin : begin + len(raw)] = raw
            self._put(0, _FAILED)
        del self._map  # it lives as long as what is kept there

    def place(self, nbytes: int, own: bool) -> HostBytes:
        begin = self._end
        self._end += _pages(nbytes)
        if own:
            try:
                _POSIX.posix_fallocate(self._file.descriptor, begin, nbytes)
            except OSError as error:
                raise DeviceFault(
                    f"the system refused {nbytes / 2**20:.0f} MiB of host memory that {self.count} processes share, "
                    f"after {begin / 2**30:.1f} GiB of it: {error}; free host memory, or lower model.offload"
                ) from error
        return np.frombuffer(self._map, np.uint8, nbytes, begin)

    def complete(self) -> None:
        self._completed += 1
        self._put(self._completed, self._end)
        self._put(0, self._completed)
        while not all(map(self._has_completed, range(self.count))):
            time.sleep(_LOOK)

    def _has_completed(self, number: int) -> bool:
        """Tells whether a process wrote as much as this one. Raises OtherRankFailed if it failed."""
        completed = self._got(number, 0)
        if completed == _FAILED:
            begin = (1 + number) * _SLOT + _TEXT
            code, message = json.loads(bytes(self._map[begin : begin + _SLOT - _TEXT]).rstrip(b"\0"))
            raise OtherRankFailed(code, f"rank {self._ranks[number]} failed: {message}", not self._group.leads)
        if completed < self._completed:
            return False
        end = self._got(number, self._completed)
        assert end == self._end, f"process {number} laid out {end} bytes, and {self.number} {self._end}"
        return True

    def _put(self, place: int, value: int) -> None:
        _CELL.pack_into(self._map, (1 + self.number) * _SLOT + place * _CELL.size, value)

    def _got(self, number: int, place: int) -> int:
        return int(_CELL.unpack_from(self._map, (1 + number) * _SLOT + place * _CELL.size)[0])
