"""Locks on open files. The kernel takes them back when their process ends, however that ends.

POSIX locks a whole file (`fcntl.flock`). Windows locks bytes of one (`msvcrt.locking`) and has no shared locks. An
exclusive lock takes a range of bytes. A shared lock takes one random byte of that range, as SQLite did on Windows 95.
The range lies beyond what files hold, because locked bytes cannot be read by others.
"""

from __future__ import annotations

import errno
import os
import secrets
from typing import Final

from flame_train.disk.system import optional_module

_FCNTL, _MSVCRT = optional_module("fcntl"), optional_module("msvcrt")

_BEGIN: Final = 1 << 30  # msvcrt takes the range from a file's position, which must fit 31 bits
_COUNT: Final = 1 << 20  # two shared locks meet in one byte once in a million times
_TAKEN: Final = (errno.EACCES, errno.EDEADLK)  # what msvcrt says of bytes that somebody else has


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file, without waiting, until its descriptor is closed.

    Raises BlockingIOError where another descriptor has a lock that forbids it, another OSError where there are none.
    """
    if _FCNTL is not None:
        kind: int = _FCNTL.LOCK_SH if shared else _FCNTL.LOCK_EX
        _FCNTL.flock(descriptor, kind | _FCNTL.LOCK_NB)
    elif _MSVCRT is not None:
        begin, count = (_BEGIN + secrets.randbelow(_COUNT), 1) if shared else (_BEGIN, _COUNT)
        _lock_bytes(descriptor, begin, count)
    else:
        raise OSError(errno.ENOSYS, "this system has no locks on files")


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
