"""Reading a file that a stranger put there: no hang, no more memory than allowed, a name fit to print."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

from flame_train.disk.system import BINARY, NONBLOCK
from flame_train.errors import DataError, shown

_MORE = 1 << 16  # bytes, of a file that grows while it is read
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def special_kind(mode: int) -> str | None:
    """Returns the kind of a file that is not regular, by its `st_mode`; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((text for test, text in _KINDS if test(mode)), "not a regular file")


def _read(file: io.FileIO, size: int, limit: int) -> bytes:
    """Returns all of a file that had `size` bytes; more than `limit` where it grew beyond that meanwhile."""
    data = file.read(size + 1) or b""  # room for all that is asked for is taken at once
    while len(data) <= limit and (more := file.read(min(_MORE, limit + 1 - len(data)))):
        data += more
    return data


def read_bytes(path: Path | str, *, limit: int, name: str | None = None) -> bytes:
    """Returns the whole content of a regular file of at most `limit` bytes.

    Pipes, devices and sockets are refused before anything is read, so that none can block or feed for ever.
    Raises DataError, whose message begins with `name` (default: the path).
    """
    label = name if name is not None else shown(path)
    try:
        kind = special_kind(os.stat(path).st_mode)
        if kind is not None:
            raise DataError(f"{label}: expected a file, found {kind}: take it out, or put a file in its place")
        # The file may be swapped between the two calls: NONBLOCK keeps a pipe from blocking even then.
        handle = os.open(path, os.O_RDONLY | NONBLOCK | BINARY)
        with os.fdopen(handle, "rb", buffering=0) as file:
            size = os.fstat(handle).st_size
            data = _read(file, size, limit) if size <= limit else None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{label}: cannot be read ({reason}): check the file, its links and permissions") from error
    if data is None or len(data) > limit:
        raise DataError(f"{label}: larger than the {limit:,} bytes allowed here: make it smaller or remove it")
    return data
