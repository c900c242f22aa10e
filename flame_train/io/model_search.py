"""Model files that other programs keep: the folders of `model.search`, such as ComfyUI's or Forge's `models`.

A folder is looked at only where the user named it. What was taken from it is noted, for the plan and the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flame_train.disk.preflight import user_cache
from flame_train.disk.roots import may_look
from flame_train.errors import ConfigError, OutputError, shown
from flame_train.io.addresses import local_place
from flame_train.io.digests import Digests
from flame_train.io.json_values import read_checked, write_checked
from flame_train.progress import progress

_LOG = logging.getLogger(__name__)
MODEL_ENDINGS: Final = (".safetensors", ".gguf")
_CHUNK: Final = 1 << 24  # bytes
_SUMS: Final = "sums.json"  # of files on the hub, by their names


@dataclass(frozen=True, slots=True)
class Found:
    """A file that was taken: the setting that asked for it, and why it was this one."""

    wanted: str
    path: Path
    why: str

    def as_dict(self) -> dict[str, str]:
        """Returns it for a reader or a program."""
        return {"for": self.wanted, "path": str(self.path), "why": self.why}


class Search:
    """The files below some folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ConfigError if one is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(
                    f"model.search: expected a folder such as ComfyUI's models, and {shown(folder)} is none; correct it"
                )
        self.folders = tuple(folders)
        self.found: list[Found] = []

    def files(self, *kept_in: str) -> list[Path]:
        """Returns the model files in folders called `kept_in`, in any case; all of them where a place has no such."""
        files = []
        for root in self.folders:
            all_files = list(_walked(root))
            named = [file for file in all_files if {part.lower() for part in file.parts[:-1]}.intersection(kept_in)]
            files += named or all_files
        return list(dict.fromkeys(files))

    def with_sum(self, size: int, sha256: str) -> Path | None:
        """Returns the file of this size and SHA-256, in hex; None if there is none."""
        alike = [file for file in self.files() if _size(file) == size]
        return next((file for file in alike if sha256_of(file) == sha256), None)

    def note(self, found: Found) -> None:
        """Keeps what was taken, once."""
        if found not in self.found:
            self.found.append(found)
            _LOG.info("%s: %s, %s", found.wanted, found.path, found.why)


_search: ContextVar[Search] = ContextVar("search", default=Search(()))  # noqa: B039  # of no folders: never noted in


@contextlib.contextmanager
def searching(folders: Sequence[str]) -> Iterator[Search]:
    """Has the body look into these folders for what it would else fetch or miss. Raises ConfigError."""
    search = Search([local_place(folder) for folder in folders])
    before = _search.set(search)
    try:
        yield search
    finally:
        _search.reset(before)


def current_search() -> Search:
    """Returns the search of the innermost `searching`; outside of all one without folders."""
    return _search.get()


def sha256_of(file: Path) -> str:
    """Returns SHA-256, in hex, of a file, which is read once as long as nobody touches it."""

    def read() -> str:
        summed = hashlib.sha256()
        with progress(f"hashing {file.name}", _size(file), in_bytes=True) as advance, file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                summed.update(chunk)
                advance(len(chunk))
        return summed.hexdigest()

    with Digests(user_cache("digests")) as digests:
        return digests.of([file], "content", read)


def remember_sum(name: str, size: int, sha256: str) -> None:
    """Keeps what the hub says of a file, for a start without network. A disk without room loses it."""
    folder = user_cache("hub")
    known = _sums()
    if folder is not None and known.get(name) != [size, sha256]:
        with contextlib.suppress(OutputError):
            write_checked(folder / _SUMS, known | {name: [size, sha256]})


def remembered_sum(name: str) -> tuple[int, str] | None:
    """Returns size and SHA-256 that the hub once said of a file."""
    match _sums().get(name):
        case [int(size), str(sha256)]:
            return size, sha256
    return None


def _sums() -> dict[str, object]:
    folder = user_cache("hub")
    content = None if folder is None else read_checked(folder / _SUMS)
    return content if isinstance(content, dict) else {}


def _walked(root: Path) -> Iterator[Path]:
    """Yields the model files below a folder in the order of their names; links are followed, each folder once."""
    seen = set[tuple[int, int]]()
    for folder, inner, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen or not may_look(folder):
            inner.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        files = (Path(folder, name) for name in sorted(names) if name.lower().endswith(MODEL_ENDINGS))
        yield from filter(may_look, files)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # a link that leads nowhere
        return -1
