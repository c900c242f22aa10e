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
from flame_train.io.checked_json import read_checked, write_checked

_FORMAT: Final = 1  # raised when digests come to mean something else
_SETTLED: Final = 2_000_000_000  # nanoseconds: the coarsest clock of a file system in use
_MOST: Final = 200_000  # digests of one folder

_Entries = dict[str, Any]  # question -> [the files' states, digest]; None where it was forgotten


class Digests:
    """The digests kept in `folder`, where None keeps none. A context manager: leaving it writes what is new.

    `now` tells the time in nanoseconds since 1970. Threads may share one.
    """

    def __init__(self, folder: Path | None, now: Callable[[], int] = time.time_ns) -> None:
        self._folder, self._now = folder if HAS_CHANGE_TIME else None, now
        self._known: dict[str, _Entries] = {}  # by folder of files
        self._new: dict[str, _Entries] = {}
        self._lock = threading.Lock()

    def of(self, files: Sequence[Path], what: str, make: Callable[[], str], place: Path | None = None) -> str:
        """What `make` gave for these files when they were as they are now; else what it gives now.

        `what` tells the digests of a file from each other: it says all that they depend on besides the files. Digests
        of one `place` are kept together; None: the folder of the first file.
        """
        begin, states = self._now(), _states(files)
        if self._folder is None or states is None:
            return make()
        kept_in, question = _asked(files, what, place)
        with self._lock:
            kept = self._entries(kept_in).get(question)
        if isinstance(kept, list) and len(kept) == 2 and kept[0] == states and isinstance(kept[1], str):
            return kept[1]
        made = make()
        settled = all(max(state[2:]) < begin - _SETTLED for state in states)
        if settled and _states(files) == states:
            with self._lock:
                self._new.setdefault(kept_in, {})[question] = [states, made]
        return made

    def forget(self, files: Sequence[Path], what: str, place: Path | None = None) -> None:
        """Has `of` ask `make` again, although the files look untouched: their content is not what it was."""
        if self._folder is not None:
            kept_in, question = _asked(files, what, place)
            with self._lock:
                self._new.setdefault(kept_in, {})[question] = None
            self.save()

    def save(self) -> None:
        """Writes what is new. A disk without room for it costs the next start its time."""
        with self._lock:
            new, self._new = self._new, {}
        for place, entries in new.items():
            path = self._path(place)
            known = _read(path, place)
            kept = entries if len(known) + len(entries) > _MOST else {**known, **entries}
            with contextlib.suppress(OutputError):
                write_checked(path, {"format": _FORMAT, "folder": place, "digests": kept})
            self._known.pop(place, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.save()

    def _entries(self, place: str) -> _Entries:
        if place not in self._known:
            self._known[place] = _read(self._path(place), place)
        return self._known[place]

    def _path(self, place: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:40]}.json"


def _read(path: Path, place: str) -> _Entries:
    """The digests of files below `place`; none from a file that is damaged, or another's."""
    content = read_checked(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("folder") != place:
        return {}
    found = content.get("digests")
    return found if isinstance(found, dict) else {}


def _asked(files: Sequence[Path], what: str, place: Path | None) -> tuple[str, str]:
    """Under which folder, and which question there, a digest is kept."""
    kept_in = os.path.dirname(os.path.abspath(files[0])) if place is None else os.path.abspath(place)
    return kept_in, "\n".join([what, *map(os.path.abspath, files)])


def _states(files: Sequence[Path]) -> list[list[int]] | None:
    """Size, inode, modification and change time of each; None where one is no plain file, or cannot be asked."""
    try:
        found = [os.stat(file) for file in files]
    except OSError:
        return None
    if not found or not all(stat.S_ISREG(status.st_mode) for status in found):
        return None
    return [[s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns] for s in found]
