"""How processes that train together end together: each leaves a sign of life in the run folder, and reads the others'.

A launcher ends all processes when one exits. A process that was stopped, or whose machine is gone, exits nowhere; and
the others wait for it in a sum for ever. So each writes a file every few seconds, and ends where another's is old, or
says that its process failed. A sign also says how far its process is. Where all of them stand still, a process waits
for one that does not come.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flame_train.disk.atomic_write import remove_stale, write_unsynced
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import disk_errors
from flame_train.disk.system import NONBLOCK, optional_module
from flame_train.errors import DeviceFault, OutputError, exit_status, lines_shown
from flame_train.io.json_values import json_tree, number, table, text, whole
from flame_train.io.run_files import SIGNS, is_sign

from .group import ProcessGroup

_EVERY = 2.0  # seconds between two signs of life
_SILENT = 40.0  # seconds without one after which a process counts as gone
_STILL = 50.0  # seconds in which no process did anything, after which one waits for another in vain
_GRACE = 3.0  # seconds that a launcher has to end a process by itself
_LEAST = 1.0  # seconds of work that a process does in that time, if it does anything
_BLOCKS: Final = 2048  # blocks of 512 bytes that it reads, and count as a second of work
_FAULTS: Final = 16  # pages of a map that had to be read, and count as one
_LARGEST: Final = 1 << 16
_RESOURCE: Final = optional_module("resource")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a process is: the meetings that it came to, whether it waits in one, and what it did so far."""

    met: int = -1
    waits: bool = False
    work: float = 0.0

    @classmethod
    def read(cls, sign: Mapping[str, Any]) -> Progress:
        """Reads what a sign of life says."""
        return cls(whole(sign.get("met")) or 0, sign.get("waits") is True, number(sign.get("work")) or 0.0)

    def is_beyond(self, other: Progress) -> bool:
        """Says whether a process that was there did something since. What it does while it waits counts for nothing."""
        if (self.met, self.waits) != (other.met, other.waits):
            return True
        return not self.waits and self.work >= other.work + _LEAST

    def __str__(self) -> str:
        return f"{'waits in' if self.waits else 'stands after'} meeting {self.met}"


class Watch:
    """Signs of life of the processes of `group` in the run folder. A process by itself leaves none."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self._group, self._path = group, folder
        self._run: OpenFolder | None = None
        self._signs: OpenFolder | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="flame-train-watch", daemon=True)
        self._told = False
        self._beats = 0

    def __enter__(self) -> Self:
        if self._group.world > 1:
            with self._group.barrier():
                if self._group.leads:
                    with disk_errors(self._path / SIGNS):
                        self._open(make=True)
                        for old in filter(is_sign, self._held.names()):
                            self._held.remove(old)
                    remove_stale(self._held)
                    self._write({})
            self._refuse_elsewhere()
            self._write({})
            self._thread.start()
        return self

    def _open(self, *, make: bool = False) -> None:
        """Holds the folder of the signs. Raises OSError: also where it is a link."""
        self._run = OpenFolder.open(self._path)
        self._signs = self._run.folder(SIGNS, make=make)

    def _refuse_elsewhere(self) -> None:
        """Raises OutputError, in all processes, if one has another folder there than the leading one."""
        identity = f"{socket.gethostname()}, process {os.getpid()}"
        leading = self._group.all_gather(identity)[0]
        with self._group.barrier():
            if self._signs is None:
                with contextlib.suppress(OSError):
                    self._open()
            sign = None if self._signs is None else self._seen(0)[0]
            if sign is None or _who(sign) != leading:
                raise OutputError(
                    f"{self._path}: rank {self._group.rank} does not see what rank 0 writes there; "
                    "give all processes the same output.dir, on a disk that their machines share"
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        if not self._told:  # else the file stays until the next start: the others have yet to read it
            with contextlib.suppress(OSError):
                self._held.remove(_file(self._group.rank), missing_ok=True)
                if not self._held.names() and self._run is not None:  # by the last of them
                    self._run.remove(SIGNS)
        for folder in filter(None, (self._signs, self._run)):
            folder.close()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the others of an error that ends this process alone: they would wait for it."""
        try:
            yield
        except Exception as error:
            if not self._group.is_shared(error):
                self._ended.set()
                self._thread.join()
                self._write({"code": exit_status(error), "message": str(error) or type(error).__name__})
                self._told = True
            raise

    def _look(self) -> None:
        others = [rank for rank in range(self._group.world) if rank != self._group.rank]
        begin = time.monotonic()
        last_signs: dict[int, tuple[object, float]] = dict.fromkeys(others, (None, begin))
        moved = {rank: (Progress(), begin) for rank in range(self._group.world)}
        while not self._ended.wait(_EVERY):
            self._write({})
            now = time.monotonic()
            _note_move(moved, self._group.rank, self._progress(), now)
            for rank in others:
                sign, state = self._seen(rank)
                if sign is not None and "code" in sign:
                    time.sleep(_GRACE)
                    self._end(whole(sign["code"]) or 1, f"rank {rank} failed: {text(sign.get('message'))}")
                now = time.monotonic()
                if state != last_signs[rank][0]:
                    last_signs[rank] = state, now
                if sign is not None:
                    _note_move(moved, rank, Progress.read(sign), now)
                if now - last_signs[rank][1] > _SILENT:
                    where = f" ({_who(sign)})" if sign else ""
                    self._end(
                        DeviceFault.exit_code, f"rank {rank}{where} has given no sign of life for {_SILENT:.0f} s"
                    )
            if now - max(since for _, since in moved.values()) > _STILL:
                positions = "; ".join(f"rank {rank} {each}" for rank, (each, _) in sorted(moved.items()))
                self._end(
                    DeviceFault.exit_code,
                    f"no process did anything for {_STILL:.0f} s, so one of them does not come where the others wait: "
                    f"{positions}",
                )

    def _progress(self) -> Progress:
        return Progress(self._group.met, self._group.waits, _worked())

    def _end(self, code: int, message: str) -> None:
        if self._ended.is_set():
            return
        print(  # noqa: T201  # the main thread waits for a sum that does not come
            lines_shown(
                f"error: rank {self._group.rank}: {message}; the last checkpoint is whole: start again to go on"
            ),
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    def _write(self, more: dict[str, Any]) -> None:
        self._beats += 1
        sign = {"pid": os.getpid(), "host": socket.gethostname(), "beat": self._beats, **asdict(self._progress())}
        name = _file(self._group.rank)
        try:
            write_unsynced(self._held / name, dumps(sign | more).encode())
        except OSError:
            with contextlib.suppress(OSError):  # a folder that was removed: the others decide
                descriptor = self._held.file(name, os.O_WRONLY)
                try:
                    os.utime(descriptor)  # a full disk has room for this
                finally:
                    os.close(descriptor)

    def _seen(self, rank: int) -> tuple[dict[str, Any] | None, object]:
        """Reads what changes with each sign of life. It opens the file: a network disk's cached times are old."""
        try:
            with os.fdopen(self._held.file(_file(rank), os.O_RDONLY | NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                raw = file.read(_LARGEST) if stat.S_ISREG(status.st_mode) else b""
        except OSError:
            return None, None
        sign = dict(table(json_tree(raw)))
        return sign or None, (raw, status.st_mtime_ns)

    @property
    def _held(self) -> OpenFolder:
        assert self._signs is not None, "the folder of the signs is not open"
        return self._signs


def _note_move(moved: dict[int, tuple[Progress, float]], rank: int, now_at: Progress, now: float) -> None:
    """Notes how far a process is, if it is further than when it was noted last."""
    if now_at.is_beyond(moved[rank][0]):
        moved[rank] = now_at, now


def _file(rank: int) -> str:
    return f"{rank}.json"


def _who(sign: dict[str, Any]) -> str:
    return f"{text(sign.get('host'))}, process {whole(sign.get('pid'))}"


def _worked() -> float:
    """Counts processor seconds of this process, and what it reads, without those of the calling thread."""
    if _RESOURCE is None:
        return time.process_time() - time.thread_time()
    whole, watching = (_RESOURCE.getrusage(kind) for kind in (_RESOURCE.RUSAGE_SELF, _RESOURCE.RUSAGE_THREAD))
    seconds, blocks, faults = (
        getattr(whole, name) - getattr(watching, name) for name in ("ru_utime", "ru_inblock", "ru_majflt")
    )
    system = whole.ru_stime - watching.ru_stime
    return float(seconds + system + blocks / _BLOCKS + faults / _FAULTS)


@contextmanager
def ending_together(group: ProcessGroup) -> Iterator[None]:
    """Has a process that fails by itself say so and end all. The others would wait for it, and it for them at its end.

    Where all fail, each waits until the others have closed what they had open: a launcher ends all when one exits.
    """
    try:
        yield
    except Exception as error:
        if not group.is_shared(error):
            print(lines_shown(f"error: rank {group.rank}: {error}"), file=sys.stderr, flush=True)  # noqa: T201
            assert group.collectives is not None
            group.collectives.abort(exit_status(error))
        group.all_gather("ended")
        raise
