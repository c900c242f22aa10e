"""`status.json` of a run: whether it runs, or how it ended.

A killed process cannot write how it ended. So "running" is true only while the lock of the folder is held. `state_of`
checks both, and the next run in the folder records the result.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flame_train.disk.atomic_write import write_atomically, write_unsynced
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import reading
from flame_train.disk.system import NONBLOCK, lock
from flame_train.errors import Interrupted, OutputError, exit_status
from flame_train.io.json_values import json_tree, table

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
