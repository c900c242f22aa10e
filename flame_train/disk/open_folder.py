"""A folder held open: names in it are found below its descriptor, wherever it is moved, and never through a link.

A path is resolved at each use. So a renamed folder takes a run's lock along, and the run would continue in another
folder at the old path. A held folder can only be written to where it is now, and knows when its path leads elsewhere.
Systems without descriptors of folders find names by path (`folder_handle.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from flame_train.disk.folder_handle import FolderHandle, open_handle
from flame_train.disk.preflight import disk_errors, disk_message
from flame_train.disk.system import NONBLOCK
from flame_train.errors import OutputError

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FolderLost(OutputError):
    """The path of a folder that is being written to leads elsewhere, or nowhere."""


class OpenFolder:
    """An open folder. `path` is what messages call it; a context manager that closes it."""

    def __init__(self, path: Path, handle: FolderHandle, parent: OpenFolder | None = None) -> None:
        self.path, self._handle = path, handle
        self._parent = parent

    @classmethod
    def open(cls, path: Path) -> Self:
        """Returns the folder that `path` leads to, by links too. Raises OSError."""
        return cls(path, open_handle(path))

    def __truediv__(self, name: str) -> FolderEntry:
        return FolderEntry(self, name)

    def folder(self, name: str, *, make: bool = False) -> OpenFolder:
        """Returns the folder `name` in this one, held. Raises OSError: also where it is a link."""
        if make:
            with contextlib.suppress(FileExistsError):
                self.make_folder(name)
        return OpenFolder(self.path / name, self._handle.folder(name), self)

    def make_folder(self, name: str) -> None:
        """Makes a folder `name` in this one. Raises OSError: also where there is something of that name."""
        self._handle.make_folder(name)

    @property
    def closes_first(self) -> bool:
        """Whether a file in it must be closed before it is renamed or removed."""
        return self._handle.closes_first

    def file(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Returns a descriptor of the file `name` in this folder. Raises OSError: also where it is a link."""
        return self._handle.file(name, flags, mode)

    def names(self) -> list[str]:
        """Returns the names in this folder, sorted. Raises OSError."""
        return sorted(self._handle.names())

    def lstat(self, name: str) -> os.stat_result | None:
        """Gives the status of `name`, of a link itself, not its target; None if it does not exist. Raises OSError."""
        try:
            return self._handle.lstat(name)
        except FileNotFoundError:
            return None

    def plain_file(self, name: str, flags: int) -> int:
        """Opens a plain file in this folder, a descriptor. Raises OSError: also for a pipe, which is not waited for."""
        descriptor = self.file(name, flags | NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a plain file")
        return descriptor

    def reading(self, name: str) -> IO[bytes]:
        """Returns a plain file, opened to be read. Raises OSError: also where there is none."""
        return os.fdopen(self.plain_file(name, os.O_RDONLY), "rb")

    def appending(self, name: str) -> IO[bytes]:
        """Returns a plain file, opened to be written to its end, and made if it is not there. Raises OSError."""
        return os.fdopen(self.plain_file(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)

    def read(self, name: str, limit: int) -> bytes:
        """Returns at most `limit` bytes of a plain file. Raises OSError: also where there is none."""
        with self.reading(name) as file:
            return file.read(limit)

    def tail(self, name: str, limit: int) -> bytes:
        """Returns the last bytes of a plain file, at most `limit`. Raises OSError: also where there is none."""
        with self.reading(name) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit)

    def rename(self, name: str, new: str) -> None:
        """Renames `name` to `new`, both in this folder. Raises OSError."""
        self._handle.rename(name, new)

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Removes a file, a link, or a folder with its content; never the target of a link."""
        status = self.lstat(name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            self._handle.remove_folder(name)
        elif status is not None or not missing_ok:
            self._handle.remove_file(name)

    def sync(self) -> None:
        """Make the names in this folder durable. Raises OSError."""
        self._handle.sync()

    def check(self) -> None:
        """Raises FolderLost unless this folder's path still leads to it."""
        if self._parent is not None:
            self._parent.check()
        try:
            status = os.stat(self.path) if self._parent is None else self._parent.lstat(self.path.name)
        except OSError as error:
            if error.errno not in _GONE:
                return  # nobody knows; what is written is written below the handle all the same
            status = None
        if status is None or not os.path.samestat(status, self._handle.status()):
            raise FolderLost(
                f"{self.path}: was moved, removed or replaced while it was being written to; {self._whereabouts()}. "
                "The run wrote nothing into the present one"
            )

    def _whereabouts(self) -> str:
        if self._handle.is_removed():
            return "the folder and its files are gone"
        now = self.now()
        if now is None:
            return "this system cannot tell where the folder is now"
        return f"the run is in {now}: to continue from there, set output.dir to it, or move it back"

    def now(self) -> Path | None:
        """Returns where the folder is now; None if it was removed or the system does not know."""
        return None if self._handle.is_removed() else self._handle.now()

    def follow(self) -> None:
        """Has messages name from here on the folder's present path, if the system knows it."""
        self.path = self.now() or self.path

    @contextmanager
    def errors(self, path: Path, *, needed: int | None = None) -> Iterator[None]:
        """Turn an OSError in the body into FolderLost if that is why, or into an OutputError about `path`."""
        try:
            yield
        except OSError as error:
            self.check()
            raise OutputError(disk_message(path, needed, error)) from error

    def close(self) -> None:
        """Let go of the folder."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A name in a held folder: where something is to be read or written."""

    folder: OpenFolder
    name: str

    @property
    def path(self) -> Path:
        """What messages call it."""
        return self.folder.path / self.name

    def __str__(self) -> str:
        return str(self.path)


Location = Path | FolderEntry
"""Where something is written: any path, or a name in a folder that is held."""


def path_of(place: Location) -> Path:
    """Returns what messages call it."""
    return place.path if isinstance(place, FolderEntry) else place


def open_folder(place: Location) -> OpenFolder:
    """Returns the folder at `place`, held. Raises OSError."""
    return place.folder.folder(place.name) if isinstance(place, FolderEntry) else OpenFolder.open(place)


@contextmanager
def folder_below(folder: Path, *names: str, make: bool = False) -> Iterator[OpenFolder]:
    """Opens the folder of these names below `folder`, each held, none a link; `make` makes them. Raises OSError."""
    with ExitStack() as opened:
        held = opened.enter_context(OpenFolder.open(folder))
        for name in names:
            held = opened.enter_context(held.folder(name, make=make))
        yield held


@contextmanager
def entry_at(place: Location) -> Iterator[FolderEntry]:
    """Holds the folder of `place` and gives its name there. Raises OutputError without one."""
    if isinstance(place, FolderEntry):
        yield place
        return
    with disk_errors(place):
        folder = OpenFolder.open(place.parent)
    with folder:
        yield folder / place.name
