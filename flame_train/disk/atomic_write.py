"""Writing a file so that it is whole or not there at all, even after a power cut.

Order: temporary sibling, flush, fsync, rename over the target, fsync of the folder. Until the rename the
old file is untouched; after any failure the temporary one is removed. Its name has a random part, and it is created
exclusively, so that no planted link is followed. Its writer holds a lock on it, by the kernel. A file without a lock
comes from a dead process, and the next write in that folder removes it. Windows cannot rename an open file. So a
writer there releases its lock just before the rename, and `remove_stale` leaves files younger than a minute.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable
from typing import IO, Final

from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import FolderEntry, Location, OpenFolder, entry_at, path_of
from flame_train.disk.preflight import disk_errors, free_bytes, is_temporary, refuse_folder, temporary_name
from flame_train.disk.system import NONBLOCK, lock

_YOUNG: Final = 60.0  # seconds: a file this young may be one that its writer has closed to rename it


def write_atomically(place: Location, chunks: Iterable[bytes | memoryview], total: int) -> None:
    """Write `chunks`, `total` bytes in all, to `place`; missing parent folders of a path are made.

    Raises OutputError when the disk refuses (full, read-only, no permission, size limit); the old file then stays. An
    error raised by `chunks` itself passes through, with the same promise.
    """
    if not isinstance(place, FolderEntry):
        refuse_folder(place)
        with disk_errors(place, needed=total):
            place.parent.mkdir(parents=True, exist_ok=True)
    with entry_at(place) as target:
        target.folder.check()
        remove_stale(target.folder)
        with target.folder.errors(target.path, needed=total):
            if free_bytes(target.path.parent) < total:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write(target, chunks, total)


def _write(target: FolderEntry, chunks: Iterable[bytes | memoryview], total: int) -> None:
    folder, errors = target.folder, target.folder.errors
    with errors(target.path, needed=total):
        temporary, descriptor = create_temporary(folder, target.name)
    stream = os.fdopen(descriptor, "wb")
    try:
        for chunk in chunks:  # outside `errors`: the producer's own errors are not the disk's
            with errors(target.path, needed=total):
                stream.write(chunk)
            fail_point("file.mid_write")
        with errors(target.path, needed=total):
            stream.flush()
            os.fsync(descriptor)
            fail_point("file.before_rename")
            folder.check()
            if folder.closes_first:
                stream.close()
            folder.rename(temporary, target.name)
            folder.sync()
    finally:
        if folder.closes_first:
            _close(stream)
        with contextlib.suppress(OSError):  # gone already after the rename; never hide the first error
            folder.remove(temporary, missing_ok=True)
        _close(stream)


def write_unsynced(target: FolderEntry, raw: bytes) -> None:
    """Write what is soon written again: readers see it whole, but it is not waited for the disk. Raises OSError."""
    folder = target.folder
    temporary, descriptor = create_temporary(folder, target.name)
    with os.fdopen(descriptor, "wb") as file:
        try:
            file.write(raw)
            file.flush()
            if not folder.closes_first:
                folder.rename(temporary, target.name)
        except OSError:
            folder.remove(temporary, missing_ok=True)
            raise
    if folder.closes_first:
        folder.rename(temporary, target.name)


def _close(stream: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # it writes again the bytes that the disk has just refused
        stream.close()


def create_temporary(folder: OpenFolder, name: str) -> tuple[str, int]:
    """Returns a new file for what will become `name`: its name, and a descriptor that is locked. Raises OSError."""
    while True:
        temporary = temporary_name(name)
        descriptor = folder.file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if _locked(descriptor) and os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # removed as stale between its making and its lock


def _locked(descriptor: int) -> bool:
    """Locks a file just made. Returns whether it is ours: no other process has locked it, to remove it."""
    try:
        lock(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def remove_stale(folder: OpenFolder) -> None:
    """Remove what dead processes left half-written in `folder`: files of such names that nobody has a lock on."""
    with contextlib.suppress(OSError):
        for name in filter(is_temporary, folder.names()):
            with contextlib.suppress(OSError):  # somebody writes it, or it is not ours to open
                _remove_if_dead(folder, name)


def _remove_if_dead(folder: OpenFolder, name: str) -> None:
    descriptor = folder.file(name, os.O_RDWR | NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return
        lock(descriptor)
        if not folder.closes_first:
            folder.remove(name)
    finally:
        os.close(descriptor)
    if folder.closes_first and time.time() - status.st_mtime > _YOUNG:
        folder.remove(name)


def remove(place: Location) -> bool:
    """Removes the file `place`. Returns whether there was one. Raises OutputError if it cannot be removed."""
    with disk_errors(path_of(place)), entry_at(place) as target:
        target.folder.check()
        status = target.folder.lstat(target.name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        target.folder.remove(target.name)
        target.folder.sync()
    return True
