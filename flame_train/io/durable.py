"""Writing a file so that it is whole or not there at all, even after a power cut.

Order: temporary sibling, flush, fsync, rename over the target, fsync of the folder. Until the rename the
old file is untouched; after any failure the temporary one is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from flame_train.io.failpoint import hit
from flame_train.io.files import disk_errors, free_bytes, refuse_folder


def write_durably(path: Path, chunks: Iterable[bytes | memoryview], total: int) -> None:
    """Write `chunks`, `total` bytes in all, to `path`; missing parent folders are made.

    Raises OutputError when the disk cannot take it (full, read-only, no permission, size limit); `path` then
    still holds what it held before. An error raised by `chunks` itself passes through, with the same promise.
    """
    refuse_folder(path)
    with disk_errors(path, needed=total):
        path.parent.mkdir(parents=True, exist_ok=True)
        if free_bytes(path.parent) < total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary = path.with_name(f".{path.name[:200]}.tmp-{os.getpid()}")
    try:
        _write_and_sync(temporary, path, chunks, total)
        with disk_errors(path, needed=total):
            hit("file.before_rename")
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # gone already after the rename; never hide the first error
            temporary.unlink(missing_ok=True)


def sweep_files(folder: Path) -> None:
    """Remove what killed processes left half-written in `folder`, which nobody else may be writing to."""
    for path in folder.glob(".*.tmp-*"):
        path.unlink(missing_ok=True)


def remove(path: Path) -> bool:
    """Whether there was a file `path` to remove. Raises OutputError if it cannot be removed."""
    with disk_errors(path):
        if not path.is_file():
            return False
        path.unlink()
        sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_and_sync(temporary: Path, path: Path, chunks: Iterable[bytes | memoryview], total: int) -> None:
    with disk_errors(path, needed=total):
        stream = open(temporary, "wb")  # noqa: SIM115  # closed below, with its own complaint held back
    try:
        for chunk in chunks:  # outside disk_errors: what the producer raises is not the disk's fault
            with disk_errors(path, needed=total):
                stream.write(chunk)
            hit("file.mid_write")
        with disk_errors(path, needed=total):
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        with contextlib.suppress(OSError):  # it tries to write again what the disk has just refused
            stream.close()
