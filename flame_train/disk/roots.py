"""The folders that a window may read and write: whatever its pages name lies below one of them, links included.

A path is resolved before it is judged. What is written is opened by its resolved names, of which none may be a link any
more; what is read is opened by the resolved path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from flame_train.disk.open_folder import FolderEntry, OpenFolder, folder_below
from flame_train.errors import ConfigError, shown


class Roots:
    """Some folders of this machine."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ConfigError where one is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"--root {shown(folder)}: expected a folder, and it is none; make it, or correct it")
        self.folders = tuple(dict.fromkeys(folder.resolve() for folder in folders))

    def holds(self, path: Path | str) -> bool:
        """Tells whether what a path leads to lies below one of the folders, or is one; also if it is not there yet."""
        return self._root_of(os.path.realpath(os.path.expanduser(path))) is not None

    def place(self, path: str) -> Path:
        """Returns the resolved path, which lies below the folders. Raises ConfigError."""
        try:
            real = os.path.realpath(os.path.expanduser(path)) if path and "\0" not in path else ""
        except (OSError, ValueError):  # a loop of links, half of a character
            real = ""
        if self._root_of(real) is None:
            listed = ", ".join(shown(folder) for folder in self.folders)
            raise ConfigError(f"{shown(path)}: expected a place below {listed}; --root names further folders")
        return Path(real)

    def _root_of(self, real: str) -> Path | None:
        return next((folder for folder in self.folders if Path(real).is_relative_to(folder)), None) if real else None

    @contextmanager
    def folder(self, path: str, *, make: bool = False) -> Iterator[OpenFolder]:
        """Opens a folder below the roots, held; `make` makes it. Raises ConfigError and OSError."""
        place = self.place(path)
        root = self._root_of(str(place))
        assert root is not None
        with folder_below(root, *place.relative_to(root).parts, make=make) as held:
            yield held

    @contextmanager
    def entry(self, path: str, *, make: bool = False) -> Iterator[FolderEntry]:
        """Holds the folder of a file below the roots, and gives its name there. Raises ConfigError and OSError."""
        place = self.place(path)
        with self.folder(str(place.parent), make=make) as held:
            yield held / place.name

    def refuse_links_out(self, folder: Path) -> None:
        """Raises ConfigError where a link below a folder leads out of the roots."""
        waiting, seen = [folder], set[Path]()
        while waiting:
            inside = waiting.pop()
            if inside in seen:
                continue
            seen.add(inside)
            try:
                entries = list(os.scandir(inside))
            except OSError:
                continue  # its reader says what is wrong with it
            for entry in entries:
                if entry.is_symlink():
                    place = Path(os.path.realpath(entry.path))
                    if os.path.lexists(place) and not self.holds(place):
                        raise ConfigError(f"{shown(entry.path)}: is a link out of the folders of --root; remove it")
                    waiting += [place] if place.is_dir() else []
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))


GIVEN = "FLAME_TRAIN_ROOTS"
"""The environment's variable by which a window tells a run its roots: a list in JSON."""


@cache
def _given() -> Roots | None:
    return Roots(list(map(Path, json.loads(os.environ[GIVEN])))) if GIVEN in os.environ else None


_roots: ContextVar[Roots | None] = ContextVar("roots", default=None)


@contextmanager
def within(roots: Roots) -> Iterator[None]:
    """Lets the body look for files that a file names, or that a link leads to, below some roots alone."""
    before = _roots.set(roots)
    try:
        yield
    finally:
        _roots.reset(before)


def may_look(path: Path | str) -> bool:
    """Tells whether a file that another names, or a link leads to, may be looked at.

    Outside of `within` all may, but for a run that a window began: it has the window's roots.
    """
    roots = _roots.get() or _given()
    return roots is None or roots.holds(path)
