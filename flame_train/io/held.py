"""A folder held open: names in it are found below its descriptor, wherever it is moved, and never through a link.

A path is looked up anew at each use, so a folder that is renamed takes a run's lock along, and the run would go on in
whatever is put in its place. A held folder can only be written to where it is now, and knows when its path leads
elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from flame_train.errors import OutputError
from flame_train.io.files import disk_errors, disk_message

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class FolderLost(OutputError):
    """The path of a folder that is being written to leads elsewhere, or nowhere."""


class Held:
    """An open folder. `path` is what messages call it; a context manager that closes it."""

    def __init__(self, path: Path, descriptor: int, parent: Held | None = None) -> None:
        self.path, self.descriptor = path, descriptor
        self._parent = parent

    @classmethod
    def open(cls, path: Path) -> Self:
        """The folder that `path` leads to, by links too. Raises OSError."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY))

    def __truediv__(self, name: str) -> Spot:
        return Spot(self, name)

    def folder(self, name: str, *, make: bool = False) -> Held:
        """The folder `name` in this one, held. Raises OSError: also where it is a link."""
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=self.descriptor)
        return Held(self.path / name, self.file(name, os.O_RDONLY | os.O_DIRECTORY), self)

    def file(self, name: str, flags: int, mode: int = 0o666) -> int:
        """A descriptor of the file `name` in this folder. Raises OSError: also where it is a link."""
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=self.descriptor)

    def names(self) -> list[str]:
        """What lies in this folder, sorted. Raises OSError."""
        return sorted(os.listdir(self.descriptor))

    def look(self, name: str) -> os.stat_result | None:
        """What `name` is, a link itself and not what it leads to; None if there is nothing. Raises OSError."""
        try:
            return os.lstat(name, dir_fd=self.descriptor)
        except FileNotFoundError:
            return None

    def read(self, name: str, limit: int) -> bytes:
        """At most `limit` bytes of a plain file. Raises OSError: also where there is none."""
        with os.fdopen(self.file(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a plain file")
            return file.read(limit)

    def rename(self, name: str, new: str) -> None:
        """`name` becomes `new`, both in this folder. Raises OSError."""
        os.rename(name, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """A file or a link goes, or a folder with all that is in it; of a link never what it leads to."""
        found = self.look(name)
        if found is not None and stat.S_ISDIR(found.st_mode):
            shutil.rmtree(name, dir_fd=self.descriptor)
        elif found is not None or not missing_ok:
            os.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in this folder durable. Raises OSError."""
        os.fsync(self.descriptor)

    def check(self) -> None:
        """Raises FolderLost unless this folder's path still leads to it."""
        if self._parent is not None:
            self._parent.check()
        try:
            found = os.stat(self.path) if self._parent is None else self._parent.look(self.path.name)
        except OSError as error:
            if error.errno not in _GONE:
                return  # nobody knows; what is written is written below the descriptor all the same
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self.descriptor)):
            raise FolderLost(
                f"{self.path}: was moved, removed or replaced while it was being written to; {self._whereabouts()}. "
                "Nothing was written to what is there now"
            )

    def _whereabouts(self) -> str:
        now = self.now()
        if now is None:
            return "the folder and what was in it are gone"
        return f"what was written is in {now}: to continue from there, set output.dir to it, or move it back"

    def now(self) -> Path | None:
        """Where the folder is now; None if it was removed, or nobody can tell."""
        if os.fstat(self.descriptor).st_nlink == 0:
            return None
        try:
            return Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        except OSError:
            return None

    def follow(self) -> None:
        """From here on this folder is called by where it is now, if that can be told."""
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
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Spot:
    """A name in a held folder: where something is to be read or written."""

    folder: Held
    name: str

    @property
    def path(self) -> Path:
        """What messages call it."""
        return self.folder.path / self.name

    def __str__(self) -> str:
        return str(self.path)


Place = Path | Spot
"""Where something is written: any path, or a name in a folder that is held."""


def path_of(place: Place) -> Path:
    """What messages call it."""
    return place.path if isinstance(place, Spot) else place


def open_folder(place: Place) -> Held:
    """The folder at `place`, held. Raises OSError."""
    return place.folder.folder(place.name) if isinstance(place, Spot) else Held.open(place)


@contextmanager
def spot(place: Place) -> Iterator[Spot]:
    """`place` as a name in a held folder; that of a plain path is held meanwhile. Raises OutputError without one."""
    if isinstance(place, Spot):
        yield place
        return
    with disk_errors(place):
        folder = Held.open(place.parent)
    with folder:
        yield folder / place.name
