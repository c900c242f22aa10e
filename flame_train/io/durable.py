"""Writing a file so that it is whole or not there at all, even after a power cut.

Order: temporary sibling, flush, fsync, rename over the target, fsync of the folder. Until the rename the
old file is untouched; after any failure the temporary one is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from flame_train.errors import OutputError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the file system or the process limit allows",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "part of the path is a file, not a folder",
    errno.EISDIR: "the path is a folder",
}


def write_durably(path: Path, chunks: Iterable[bytes | memoryview], total: int) -> None:
    """Write `chunks`, `total` bytes in all, to `path`; missing parent folders are made.

    Raises OutputError when the disk cannot take it (full, read-only, no permission, size limit); `path` then
    still holds what it held before. An error raised by `chunks` itself passes through, with the same promise.
    """
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; give the name of a file to write")
    with _explained(path, total):
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary = path.with_name(f".{path.name[:200]}.tmp-{os.getpid()}")
    try:
        _write_and_sync(temporary, path, chunks, total)
        with _explained(path, total):
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # gone already after the rename; never hide the first error
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_and_sync(temporary: Path, path: Path, chunks: Iterable[bytes | memoryview], total: int) -> None:
    with contextlib.ExitStack() as stack:
        with _explained(path, total):
            stream: BinaryIO = stack.enter_context(open(temporary, "wb"))
        for chunk in chunks:
            with _explained(path, total):
                stream.write(chunk)
        with _explained(path, total):
            stream.flush()
            os.fsync(stream.fileno())


@contextlib.contextmanager
def _explained(path: Path, total: int) -> Iterator[None]:
    """Turn an OSError into an OutputError that says how much was needed and how much there is."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise OutputError(
            f"{path}: cannot be written: {reason}. Needed: {total} bytes; free there: {_free_space(path)}. "
            "What was there before is untouched. Free some space or choose another folder"
        ) from error


def _free_space(path: Path) -> str:
    for folder in path.absolute().parents:
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free} bytes"
    return "unknown"
