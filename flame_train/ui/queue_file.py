"""The queue's file: which runs wait, which were started, and what came of them. People read it and mend it by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from flame_train.config.render import toml_value
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import reading
from flame_train.errors import ConfigError, OutputError, shown
from flame_train.io.json_values import toml_tree

QUEUE: Final = "flame-train-queue.toml"
STATES: Final = ("waiting", "started", "done", "stopped", "failed")
GO_ON, WAIT = "go on", "wait"
_LARGEST: Final = 1 << 20
_MOST: Final = 1000
_LONGEST: Final = 4096  # characters of a value
_SAID: Final = 500  # of what is told of a run
_NAME: Final = 64  # of an id, and of an attempt
_HEAD: Final = """\
# The queue of `flame-train ui`. Runs start in this order, each on a device of its own that is free.
# It may be changed by hand, also while the window is open. Remove a [[runs]] to take a run out.
# after_failure: "go on" starts the next run, "wait" waits for you. paused: why nothing is started; "": runs start.
# state: waiting, started, done, stopped or failed. device: "cpu", "cuda" for any GPU, or "cuda:1".
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A run of the queue: the config and the folder it trains in, where, and how far it is."""

    id: str
    config: str
    folder: str
    device: str
    state: str = "waiting"
    attempt: str = ""
    on: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True)
class Book:
    """All that the file says. `paused` tells why no further run starts."""

    after_failure: str = GO_ON
    paused: str = ""
    runs: tuple[Entry, ...] = ()


def is_device(name: str) -> bool:
    """Tells whether a run can ask for a device of this name."""
    return name in ("cpu", "cuda") or (name.startswith("cuda:") and name[5:].isascii() and name[5:].isdecimal())


def read_queue(folder: OpenFolder) -> Book:
    """Returns what the file in a folder says; without one an empty queue. Raises ConfigError naming what is damaged."""
    path = folder.path / QUEUE
    try:
        with reading(path, FileNotFoundError):
            raw = folder.read(QUEUE, _LARGEST + 1)
    except FileNotFoundError:
        return Book()
    try:
        tree = toml_tree(raw.decode()) if len(raw) <= _LARGEST else {}
    except ValueError as error:
        raise _damaged(path, f"expected TOML, got {error}") from None
    if len(raw) > _LARGEST:
        raise _damaged(path, f"expected at most {_LARGEST:,} bytes")
    runs = tree.pop("runs", [])
    if not isinstance(runs, list) or len(runs) > _MOST or not all(isinstance(run, dict) for run in runs):
        raise _damaged(path, f"runs: expected at most {_MOST} tables [[runs]]")
    book = Book(**_texts(path, "", tree, Book, ()), runs=tuple(_entry(path, n, run) for n, run in enumerate(runs, 1)))
    if book.after_failure not in (GO_ON, WAIT):
        raise _damaged(path, f'after_failure: expected "{GO_ON}" or "{WAIT}", got {shown(book.after_failure)!r}')
    if len({entry.id for entry in book.runs}) < len(book.runs):
        raise _damaged(path, "id: two runs have the same")
    return book


def _entry(path: Path, number: int, run: Mapping[str, Any]) -> Entry:
    where = f"runs {number}: "
    entry = Entry(**_texts(path, where, run, Entry, ("id", "config", "folder", "device")))
    if max(len(entry.id), len(entry.attempt)) > _NAME:
        raise _damaged(path, f"{where}id, attempt: expected at most {_NAME} characters")
    if entry.state not in STATES:
        raise _damaged(path, f"{where}state: expected one of {', '.join(STATES)}, got {shown(entry.state)!r}")
    for name in (entry.device, entry.on or "cpu"):
        if not is_device(name):
            raise _damaged(path, f'{where}device: expected "cpu", "cuda" or "cuda:N", got {shown(name)!r}')
    if entry.state == "started" and not (entry.attempt and entry.on):
        raise _damaged(path, f'{where}a started run has attempt and on; make its state "waiting" to start it')
    return entry


def _texts(path: Path, where: str, tree: Mapping[str, Any], kind: type, needed: tuple[str, ...]) -> dict[str, str]:
    names = [each.name for each in fields(kind) if each.name != "runs"]
    for name in (*tree, *needed):
        value = tree.get(name)
        if name not in names:
            raise _damaged(path, f"{where}{shown(name)}: expected one of {', '.join(names)}")
        if not isinstance(value, str) or len(value) > _LONGEST or "\0" in value or (name in needed and not value):
            raise _damaged(path, f"{where}{name}: expected a text in quotes")
    return dict(tree)


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what}; mend it, or remove the file for an empty queue. Meanwhile nothing is started")


def write_queue(folder: OpenFolder, book: Book) -> None:
    """Writes the file, whole or not at all. Raises OutputError where the disk refuses it, or `read_queue` would."""
    lines = [_HEAD, *(f"{name} = {toml_value(getattr(book, name))}" for name in ("after_failure", "paused"))]
    for entry in book.runs:
        lines += ["", "[[runs]]"]
        cut = replace(entry, said=entry.said[:_SAID])
        lines += [f"{each.name} = {toml_value(getattr(cut, each.name))}" for each in fields(Entry)]
    raw = ("\n".join(lines) + "\n").encode()
    if len(book.runs) > _MOST or len(raw) > _LARGEST:
        raise OutputError(f"{folder.path / QUEUE}: the queue has no room for more; remove runs from it that are done")
    write_atomically(folder / QUEUE, [raw], len(raw))
