"""Features that only some operating systems have: flags of `os.open`, modules of the standard library, locks.

The kernel takes a lock back when its process ends, however that ends. POSIX locks a whole file (`fcntl.flock`). Windows
locks bytes of one (`msvcrt.locking`) and has no shared locks. An exclusive lock takes a range of bytes. A shared lock
takes one random byte of that range, as SQLite did on Windows 95. The range lies beyond what files hold, because locked
bytes cannot be read by others.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import re
import secrets
import sys
import time
from types import ModuleType
from typing import Final

NONBLOCK: Final[int] = getattr(os, "O_NONBLOCK", 0)
"""Opening a pipe does not wait for its other end. Windows has no pipes among its files."""

BINARY: Final[int] = getattr(os, "O_BINARY", 0)
"""Line ends stay as they are: Windows alone would translate them."""

FOLDER: Final[int | None] = getattr(os, "O_DIRECTORY", None)
"""A folder is opened, and nothing else; None where `os.open` opens no folders."""

NO_LINK: Final[int | None] = getattr(os, "O_NOFOLLOW", None)
"""A link is refused and not followed; None where `os.open` follows every link."""

READ_AND_SYNC: Final[int] = os.O_RDONLY if FOLDER is not None else os.O_RDWR
"""A file is read, and then waited for to be on the disk: Windows syncs only what could be written to."""


HAS_CHANGE_TIME: Final[bool] = not hasattr(os.stat_result, "st_file_attributes")
"""`st_ctime` is when a file was changed last, and nobody can set it. On Windows it is when the file was made."""


_RESERVED: Final = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE)
_LONGEST_PATH: Final = 259  # characters that Windows takes where long paths are not enabled


def is_device_name(name: str) -> bool:
    """Tells whether Windows has a device of this name in every folder, so that no file there can have it."""
    return _RESERVED.fullmatch(name) is not None


def path_limit() -> int | None:
    """Returns how many characters a whole path may have; None: more than anybody writes."""
    if sys.platform == "win32":
        enabled = getattr(ctypes.WinDLL("ntdll"), "RtlAreLongPathsEnabled", None)  # Windows 10 of 2016 and later
        limit = None if enabled is not None and enabled() & 0xFF else _LONGEST_PATH
    else:
        limit = None
    return limit


def optional_module(name: str) -> ModuleType | None:
    """Imports a module; None where the system lacks it. By a string, for mypy knows it on one system only."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_FCNTL, _MSVCRT = optional_module("fcntl"), optional_module("msvcrt")

_TRIES, _PAUSE = 10, 0.02  # seconds
_BEGIN: Final = 1 << 30  # msvcrt takes the range from a file's position, which must fit 31 bits
_COUNT: Final = 1 << 20  # two shared locks meet in one byte once in a million times
_TAKEN: Final = (errno.EACCES, errno.EDEADLK)  # what msvcrt says of bytes that somebody else has


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Locks an open file until its descriptor is closed. BlockingIOError where another has it, else OSError."""
    if _FCNTL is not None:
        kind: int = _FCNTL.LOCK_SH if shared else _FCNTL.LOCK_EX
        _FCNTL.flock(descriptor, kind | _FCNTL.LOCK_NB)
    elif _MSVCRT is not None:
        begin, count = (_BEGIN + secrets.randbelow(_COUNT), 1) if shared else (_BEGIN, _COUNT)
        _lock_bytes(descriptor, begin, count)
    else:
        raise OSError(errno.ENOSYS, "this system has no locks on files")


def lock_soon(descriptor: int, *, shared: bool = False) -> None:
    """Locks as `lock` does, and waits for a reader, who holds its lock for a moment to see whether there is another."""
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            return lock(descriptor, shared=shared)
        time.sleep(_PAUSE)
    lock(descriptor, shared=shared)


def _lock_bytes(descriptor: int, begin: int, count: int) -> None:
    assert _MSVCRT is not None
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, begin, os.SEEK_SET)
    try:
        _MSVCRT.locking(descriptor, _MSVCRT.LK_NBLCK, count)
    except OSError as error:
        if error.errno in _TAKEN:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        raise
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
