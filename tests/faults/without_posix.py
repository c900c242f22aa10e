"""`python without_posix.py ARGUMENT...`: the program as on a system that has nothing of POSIX but its paths.

Four modules are gone, as are flags, signals and calls that Windows lacks. No folder is opened, and no file that this
process has open is renamed or removed. `msvcrt.locking` is a stand-in: it locks ranges of bytes for an open file.
`--script FILE ARGUMENT...` runs another program so.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import runpy
import shutil
import signal
import struct
import subprocess  # noqa: F401 - it takes whatever system has msvcrt for Windows
import sys
from types import ModuleType
from typing import Any

import psutil  # noqa: F401 - on Linux it needs `resource`

GONE = ("fcntl", "pwd", "resource", "termios")
LACKING: dict[Any, tuple[str, ...]] = {
    os: ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_ACCMODE", "sysconf", "statvfs", "ST_RDONLY", "getuid", "fork"),
    signal: ("SIGHUP", "SIGUSR1", "SIGKILL"),
    mmap: ("MADV_DONTNEED",),
}
_open, _control, _statvfs = os.open, fcntl.fcntl, os.statvfs
_LOCK = struct.Struct("hhqqi4x")  # struct flock of Linux on 64 bits


def disk_usage(path: Any) -> Any:
    """`shutil.disk_usage`, which asks a function of Windows there."""
    found = _statvfs(path)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return shutil._ntuple_diskusage(total, total - free, free)  # type: ignore[attr-defined]


def without_descriptors(call: Any) -> Any:
    """The call, refused below a folder's descriptor."""

    def called(*arguments: Any, **named: Any) -> Any:
        if any(named.pop(name, None) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            raise NotImplementedError(f"{call.__name__}: dir_fd unavailable on this platform")
        return call(*arguments, **named)

    called.__name__ = call.__name__
    return called


def open_no_folder(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
    """`os.open`, which opens files alone."""
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return _open(path, flags, *arguments, **named)


def refused_while_open(call: Any) -> Any:
    """The call, refused for a file, or for a folder with files, that this process has open."""

    def called(path: Any, *arguments: Any, **named: Any) -> Any:
        place = os.path.realpath(path)
        for number in os.listdir("/proc/self/fd"):
            try:
                found = os.path.realpath(os.readlink(f"/proc/self/fd/{number}"))
            except OSError:  # that of the listing
                continue
            if found == place or found.startswith(place + os.sep):
                raise PermissionError(errno.EACCES, f"{found} is open", path)
        return call(path, *arguments, **named)

    called.__name__ = call.__name__
    return called


def locking(descriptor: int, mode: int, count: int) -> None:
    """Locks `count` bytes from the file's position for this open file; `errno.EACCES` where another has one of them.

    Linux locks for an open file what is open for writing alone: of any other it is only said whether it could be.
    """
    assert mode == 2, "only LK_NBLCK is used"
    writable = _control(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
    target = descriptor if writable else _open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    begin = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        _control(target, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, count, 0))
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
    finally:
        if target != descriptor:
            os.close(target)


def leave_posix() -> None:
    """From here on this process is on such a system."""
    stand_in = ModuleType("msvcrt")
    stand_in.LK_NBLCK, stand_in.locking = 2, locking  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = stand_in
    for name in GONE:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in LACKING.items():
        for name in names:
            delattr(module, name)
    os.open = open_no_folder
    for name in ("open", "mkdir", "lstat", "stat", "unlink"):
        setattr(os, name, without_descriptors(getattr(os, name)))
    for name in ("rename", "replace", "unlink", "remove", "rmdir"):
        setattr(os, name, without_descriptors(refused_while_open(getattr(os, name))))
    os.supports_dir_fd, os.supports_fd = set(), {os.stat}
    shutil.disk_usage = disk_usage
    shutil._use_fd_functions = shutil.rmtree.avoids_symlink_attacks = False  # type: ignore[attr-defined]


if __name__ == "__main__":
    leave_posix()
    if sys.argv[1] == "--script":
        del sys.argv[:2]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from flame_train import cli

        sys.argv[0] = "flame-train"
        cli.main()
