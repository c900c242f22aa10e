"""A handle on a folder, below which names are found: its descriptor, or its path where the system opens no folders.

By descriptor a name is found in that very folder, wherever it is moved. Held by its path, the folder is checked
before each use, and another one in its place is refused. Between the look and the use another process may still
change it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Final, Protocol

from flame_train.disk.system import BINARY, FOLDER, NO_LINK

_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds


class FolderHandle(Protocol):
    """Operations on names in a folder. Every method raises OSError; none follows a link in the folder."""

    closes_first: bool
    """Whether a file must be closed before it is renamed or removed."""

    def folder(self, name: str) -> FolderHandle: ...
    def make_folder(self, name: str) -> None: ...
    def file(self, name: str, flags: int, mode: int) -> int: ...
    def names(self) -> list[str]: ...
    def lstat(self, name: str) -> os.stat_result: ...
    def rename(self, name: str, new: str) -> None: ...
    def remove_file(self, name: str) -> None: ...
    def remove_folder(self, name: str) -> None: ...

    def sync(self) -> None:
        """Make the names durable, if the system can."""

    def status(self) -> os.stat_result:
        """Returns the status by which the folder is known again."""

    def is_removed(self) -> bool:
        """Tells whether the folder is known to be gone."""

    def now(self) -> Path | None:
        """Returns where the folder is now, if the system knows."""

    def close(self) -> None: ...


class DescriptorHandle:
    """A folder by its descriptor."""

    closes_first = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def folder(self, name: str) -> DescriptorHandle:
        return DescriptorHandle(self.file(name, os.O_RDONLY | _known(FOLDER), 0o666))

    def make_folder(self, name: str) -> None:
        os.mkdir(name, dir_fd=self._descriptor)

    def file(self, name: str, flags: int, mode: int) -> int:
        return os.open(name, flags | _known(NO_LINK), mode, dir_fd=self._descriptor)

    def names(self) -> list[str]:
        return os.listdir(self._descriptor)

    def lstat(self, name: str) -> os.stat_result:
        return os.lstat(name, dir_fd=self._descriptor)

    def rename(self, name: str, new: str) -> None:
        os.rename(name, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove_file(self, name: str) -> None:
        os.unlink(name, dir_fd=self._descriptor)

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def is_removed(self) -> bool:
        return self.status().st_nlink == 0

    def now(self) -> Path | None:
        try:
            return Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            return None

    def close(self) -> None:
        os.close(self._descriptor)


class PathHandle:
    """A folder by its path, and by its identity when it was opened."""

    closes_first = True

    def __init__(self, path: Path, parent: PathHandle | None = None) -> None:
        self._path, self._parent = path.absolute(), parent
        self._status = self._found()

    def folder(self, name: str) -> PathHandle:
        return PathHandle(self._at(name), self)

    def make_folder(self, name: str) -> None:
        os.mkdir(self._at(name))

    def file(self, name: str, flags: int, mode: int) -> int:
        path = self._at(name)
        if os.path.lexists(path):
            _refuse_special(path)
        descriptor = os.open(path, flags | BINARY, mode)
        try:
            _refuse_special(path)  # while a file is open Windows lets nobody put another into its place
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def names(self) -> list[str]:
        self._check()
        return os.listdir(self._path)

    def lstat(self, name: str) -> os.stat_result:
        return os.lstat(self._at(name))

    def rename(self, name: str, new: str) -> None:
        """Renames; a file that another program has open is waited for, as virus scanners open each new one."""
        for pause in _PAUSES:
            with contextlib.suppress(PermissionError):
                return os.replace(self._at(name), self._at(new))
            time.sleep(pause)
        return os.replace(self._at(name), self._at(new))

    def remove_file(self, name: str) -> None:
        os.unlink(self._at(name))

    def remove_folder(self, name: str) -> None:
        shutil.rmtree(self._at(name))

    def sync(self) -> None:
        """Does nothing: the system syncs files alone."""

    def status(self) -> os.stat_result:
        return self._status

    def is_removed(self) -> bool:
        return False

    def now(self) -> Path | None:
        return None

    def close(self) -> None:
        """Does nothing: no folder is open."""

    def _at(self, name: str) -> Path:
        """Returns the path of a name in the folder, which must still be there."""
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise OSError(errno.EINVAL, "not a name in a folder")
        self._check()
        return self._path / name

    def _check(self) -> None:
        if self._parent is not None:
            self._parent._check()
        if not os.path.samestat(self._found(), self._status):
            raise OSError(errno.ESTALE, "the folder was replaced by another")

    def _found(self) -> os.stat_result:
        """Returns the status of the path: a folder, and below another handle's no link to one."""
        status = os.stat(self._path) if self._parent is None else os.lstat(self._path)
        if _is_link(status):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return status


def open_handle(path: Path) -> FolderHandle:
    """Returns a handle on the folder that `path` leads to, by links too. Raises OSError."""
    return DescriptorHandle(os.open(path, os.O_RDONLY | _known(FOLDER))) if _HAS_DESCRIPTORS else PathHandle(path)


def _has_descriptors() -> bool:
    below = {os.open, os.mkdir, os.stat, os.rename, os.unlink} <= os.supports_dir_fd
    listed = os.listdir in os.supports_fd and shutil.rmtree.avoids_symlink_attacks
    return below and listed and FOLDER is not None and NO_LINK is not None


_HAS_DESCRIPTORS: Final = _has_descriptors()


def _known(flag: int | None) -> int:
    assert flag is not None, "a system that opens folders has the flags for it"
    return flag


def _is_link(status: os.stat_result) -> bool:
    """Tells whether this is a symbolic link or, on Windows, a junction."""
    junction = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", None)
    return stat.S_ISLNK(status.st_mode) or (junction is not None and getattr(status, "st_reparse_tag", 0) == junction)


def _refuse_special(path: Path) -> None:
    """Raises OSError unless it is a plain file: a link would be followed, a pipe would block."""
    status = os.lstat(path)
    if _is_link(status):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
