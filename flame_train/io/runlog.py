"""`log.jsonl` of a run, a line a step, and `status.json`, which says whether it runs or how it ended.

A full disk delays lines and costs none of them. A killed process cannot write how it ended, so "running" is true only
while the lock of the folder is held. `state_of` checks both, and the next run in the folder records the result.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from flame_train.disk.atomic_write import write_atomically, write_unsynced
from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import FolderEntry, OpenFolder
from flame_train.disk.preflight import reading
from flame_train.disk.system import NONBLOCK, lock
from flame_train.errors import Interrupted, OutputError, exit_status
from flame_train.io.json_values import json_tree, number, table, whole

STATUS: Final = "status.json"
LOCK: Final = ".lock"

FORMAT: Final = 1
"""The format of a run folder, which its status names: raised when the meaning of its files changes."""

_UNIT: Final = 512  # bytes: a status is filled up to a multiple of them, so that the next one is as long
_LARGEST: Final = 1 << 16


def write_status(folder: OpenFolder, status: Mapping[str, Any]) -> None:
    """Raises OutputError; on a disk without room the file that is there is written over: its size is the same."""
    raw = _padded(status)
    try:
        write_atomically(folder / STATUS, [raw], len(raw))
    except OutputError:
        folder.check()
        if not _written_over(folder, raw):
            raise


def refresh_status(folder: OpenFolder, status: Mapping[str, Any]) -> None:
    """Does as `write_status`, of a run that goes on: readers see it whole, but it is not waited for the disk.

    A disk that refuses it keeps the status before.
    """
    with contextlib.suppress(OSError):
        write_unsynced(folder / STATUS, _padded(status))


def _padded(status: Mapping[str, Any]) -> bytes:
    text = json.dumps(status, indent=1)
    return (text + " " * (-(len(text) + 1) % _UNIT) + "\n").encode()


def _written_over(folder: OpenFolder, raw: bytes) -> bool:
    """Puts `raw` into the file of just as many bytes that is there. Returns whether it could."""
    try:
        with os.fdopen(folder.file(STATUS, os.O_RDWR), "r+b") as file:
            return os.fstat(file.fileno()).st_size == len(raw) and file.write(raw) == len(raw)
    except OSError:
        return False


def read_status(folder: OpenFolder) -> dict[str, Any]:
    """Reads what the file says; nothing where it is not there or makes no sense. OutputError if it cannot be read."""
    try:
        with reading(folder.path / STATUS, FileNotFoundError):
            return dict(table(json_tree(folder.read(STATUS, _LARGEST))))
    except FileNotFoundError:
        return {}


def state_of(path: Path) -> dict[str, Any]:
    """Returns the status in the folder `path`, "interrupted" for a dead "running". Raises OSError or OutputError."""
    with OpenFolder.open(path) as folder:
        status = read_status(folder)
        return status if is_locked(folder) else mark_dead(status)


def mend_status(path: Path) -> None:
    """Has the status of a killed run say so; a folder that is not there, in use or read-only is left."""
    with contextlib.suppress(OSError, OutputError), OpenFolder.open(path) as folder:
        status = read_status(folder)
        if status.get("state") != "running" or "pid" not in status:
            return
        descriptor = folder.plain_file(LOCK, os.O_RDWR)
        try:
            lock(descriptor)
            write_status(folder, mark_dead(read_status(folder)))
        finally:
            os.close(descriptor)


def mark_dead(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same status of a run whose process is gone."""
    return {**status, "state": "interrupted"} if status.get("state") == "running" else dict(status)


def is_locked(folder: OpenFolder) -> bool:
    """Tells whether a run has the folder."""
    try:
        descriptor = folder.file(LOCK, os.O_RDONLY | NONBLOCK)
    except OSError:
        return False
    try:
        lock(descriptor, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def ending(error: BaseException | None) -> tuple[str, int]:
    """Returns state and exit code of a run that ended with `error`."""
    if error is None:
        return "done", 0
    requested = isinstance(error, Interrupted | KeyboardInterrupt)
    return "interrupted" if requested else "failed", exit_status(error)


_LOG = logging.getLogger(__name__)

_LONGEST = 1 << 16  # bytes of a line; ours have some hundred


class LogFile:
    """The log at a name in a held folder. Raises OSError where it cannot be opened: also where it is a link.

    Lines that the disk has no room for wait in `waiting`, and are written before the next one. So the file always has
    the lines before those that wait, and a checkpoint that takes these along loses none.
    """

    def __init__(self, place: FolderEntry) -> None:
        self._place = place
        self._warned = False
        self.waiting = b""
        self._file = place.folder.appending(place.name)
        self._whole = os.fstat(self._file.fileno()).st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line at once; NaN and infinity, which JSON has not, as null. No room for it costs one warning."""
        self.waiting += json.dumps(_without_nan(record)).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write the lines that wait, if there is room now."""
        if not self.waiting:
            return
        try:
            fail_point("log.append")
            os.ftruncate(self._file.fileno(), self._whole)  # away with what an earlier try left of a line
            if self._file.write(self.waiting) < len(self.waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error)
        else:
            self._whole += len(self.waiting)
            self.waiting = b""

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _LOG.warning("%s: %s; its lines wait for room", self._place, error.strerror)
            self._warned = True

    def cut(self, step: int, waited: bytes = b"") -> None:
        """Drop every line after `step`, and a last line that was cut short. Raises OSError.

        `waited` are lines that a checkpoint took along: those that are not there are written.
        """
        self._whole, last = 0, 0
        with self._place.folder.reading(self._place.name) as file:
            while line := file.readline(_LONGEST):  # a longer one is none of ours, and may be as long as the disk
                if not line.endswith(b"\n") or step_of(line) > step:
                    break
                self._whole, last = self._whole + len(line), int(step_of(line))
        os.ftruncate(self._file.fileno(), self._whole)
        self.waiting = b"".join(line for line in waited.splitlines(keepends=True) if last < step_of(line) <= step)
        self.write()

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        self.write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._warn(error)

    def last(self) -> bytes:
        """Returns the last line; empty if there is none. Raises OSError."""
        *_, line = [b"", *self._place.folder.tail(self._place.name, _LONGEST).splitlines()]
        return line

    def losses(self, count: int) -> list[float]:
        """Returns the losses of the last `count` lines, without those that are not finite. Raises OSError."""
        with self._place.folder.reading(self._place.name) as file:
            lines = deque(iter(lambda: file.readline(_LONGEST), b""), count)
        losses = (number(table(json_tree(line)).get("loss")) for line in (*lines, *self.waiting.splitlines()))
        return [loss for loss in losses if loss is not None][-count:]

    def close(self) -> None:
        """Write what waits, if there is room now, and close the file."""
        self.write()
        self._file.close()


def step_of(line: bytes) -> float:
    """Returns the step that a line says; infinity where it is not one that a run wrote: it is cut off from there on."""
    step = record_of(line).get("step", math.inf)
    return cast(float, step)


def record_of(line: bytes) -> Mapping[str, Any]:
    """Returns what a line says; empty where it is not one that a run wrote, with a step."""
    record = table(json_tree(line))
    return record if whole(record.get("step")) is not None else {}


def _without_nan(value: Any) -> Any:
    """Returns the value with None for each number that JSON has not; a mapping's values alike."""
    if isinstance(value, Mapping):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
