"""Digests that files gave before: a file that was not touched since is not read again.

A file is the one that it was if its path, size, inode, modification time and change time are. The last is the
system's own: restoring a modification time, as `cp -p` and archives do, sets it anew. A file that was changed within
two seconds before it was read is not remembered. A file system's clock may stand still between two changes.

Digests lie in the user's cache folder, a file for each folder of files. It is written whole; of two processes that
write it at once the last wins, and what the other found is found again. One that is damaged says nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from flame_train.disk.system import HAS_CHANGE_TIME
from flame_train.errors import OutputError
from flame_train.io.json_values import read_checked, write_checked

_FORMAT: Final = 2  # raised when digests come to mean something else
_SETTLED: Final = 2_000_000_000  # nanoseconds: the coarsest clock of a file system in use
_MOST: Final = 1_000_000  # digests of one folder

_Entries = dict[str, Any]  # question -> [the files' states, digest]; None where it was forgotten
_Kinds = dict[str, _Entries]  # what the digests say -> those


class Digests:
    """The digests kept in `folder`, where None keeps none. A context manager: leaving it writes what is new.

    `now` tells the time in nanoseconds since 1970. Threads may share one.
    """

    def __init__(self, folder: Path | None, now: Callable[[], int] = time.time_ns) -> None:
        self._folder, self._now = folder if HAS_CHANGE_TIME else None, now
        self._known: dict[str, _Kinds] = {}  # by folder of files
        self._new: dict[str, _Kinds] = {}
        self._lock = threading.Lock()

    def known(self, file: str, what: str, place: str) -> str | None:
        """Gives what `of` would of one file without asking `make`; None if it would ask. Both paths are absolute."""
        return None if self._folder is None else self._kept(place, what, _within(file, place), _states([file]))

    def of(
        self, files: Sequence[Path | str], what: str, make: Callable[[], str], place: Path | str | None = None
    ) -> str:
        """Returns what `make` gave for these files when they were as they are now; else what it gives now.

        `what` tells the digests of a file from each other: it says all that they depend on besides the files. Digests
        of one `place` are kept together; None: the folder of the first file.
        """
        begin, states = self._now(), _states(files)
        if self._folder is None or states is None:
            return make()
        kept_in, question = _place_and_question(files, place)
        stored = self._kept(kept_in, what, question, states)
        if stored is not None:
            return stored
        digest = make()
        settled = all(max(state[2:]) < begin - _SETTLED for state in states)
        if settled and _states(files) == states:
            with self._lock:
                self._new.setdefault(kept_in, {}).setdefault(what, {})[question] = [states, digest]
        return digest

    def forget(self, files: Sequence[Path], what: str, place: Path | None = None) -> None:
        """Has `of` ask `make` again, although the files look untouched: their content is not what it was."""
        if self._folder is not None:
            kept_in, question = _place_and_question(files, place)
            with self._lock:
                self._new.setdefault(kept_in, {}).setdefault(what, {})[question] = None
            self.save()

    def save(self) -> None:
        """Writes what is new. A disk without room for it costs the next start its time."""
        with self._lock:
            new, self._new = self._new, {}
        for place, kinds in new.items():
            path = self._path(place)
            known = _read(path, place)
            if sum(map(len, [*known.values(), *kinds.values()])) > _MOST:
                known = {}
            merged = known | {what: {**known.get(what, {}), **entries} for what, entries in kinds.items()}
            with contextlib.suppress(OutputError):
                write_checked(path, {"format": _FORMAT, "folder": place, "digests": merged})
            self._known.pop(place, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.save()

    def _kept(self, place: str, what: str, question: str, states: list[list[int]] | None) -> str | None:
        """Returns the digest that is kept for files with these states."""
        kinds = self._known.get(place)
        if kinds is None:
            with self._lock:
                kinds = self._known.get(place)
                if kinds is None:
                    kinds = self._known[place] = _read(self._path(place), place)
        entry = kinds[what].get(question) if what in kinds else None
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == states and isinstance(entry[1], str):
            return entry[1]
        return None

    def _path(self, place: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:40]}.json"


def _read(path: Path, place: str) -> _Kinds:
    """Returns the digests of files below `place`; none from a file that is damaged, or another's."""
    content = read_checked(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("folder") != place:
        return {}
    digests = content.get("digests")
    return digests if isinstance(digests, dict) and all(isinstance(kind, dict) for kind in digests.values()) else {}


def _place_and_question(files: Sequence[Path | str], place: Path | str | None) -> tuple[str, str]:
    """Names the folder, and the question there, under which a digest is kept."""
    paths = [os.path.abspath(file) for file in files]
    kept_in = os.path.dirname(paths[0]) if place is None else os.path.abspath(place)
    return kept_in, "\n".join(_within(path, kept_in) for path in paths)


def _within(path: str, place: str) -> str:
    """Returns an absolute path, from `place` on where it lies there."""
    return path[len(place) + 1 :] if path.startswith(place) and path[len(place) : len(place) + 1] == os.sep else path


def _states(files: Sequence[Path | str]) -> list[list[int]] | None:
    """Asks size, inode, modification and change time of each; None where one is no plain file, or unknown."""
    try:
        statuses = [os.stat(file) for file in files]
    except OSError:
        return None
    if not statuses or not all(stat.S_ISREG(status.st_mode) for status in statuses):
        return None
    return [[s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns] for s in statuses]
