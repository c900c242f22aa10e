"""What is asked of a run that goes on: a file in its folder, which the training loop takes at a step's end.

Each kind has a file of its own, so two who ask at once never overwrite each other. It is written whole, beside its
place. A run that begins removes those that an earlier process did not take.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final, Literal, get_args

from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import reading
from flame_train.errors import ConfigError, OutputError, shown
from flame_train.io.json_values import json_tree, table, toml_tree
from flame_train.io.runlog import is_locked, mark_dead, read_status

Kind = Literal["sample", "save", "stop"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_LOG = logging.getLogger(__name__)
_LARGEST: Final = 1 << 10  # bytes of a request
_CONFIG: Final = 1 << 20


def name_of(kind: Kind) -> str:
    """Returns the name of a request's file."""
    return f"request-{kind}.json"


def ask(folder: OpenFolder, kind: Kind) -> Path:
    """Asks a run for samples now, for a checkpoint now, or to stop as Ctrl-C does. Returns the request's file.

    Raises:
        OutputError: no run goes on there, or the disk refuses the file.
        ConfigError: samples are asked of a run without prompts.
    """
    if not is_locked(folder):
        state = mark_dead(read_status(folder)).get("state", "not begun")
        raise OutputError(f"{folder.path}: expected a run that goes on, got one that is {shown(state)}; start it first")
    if kind == "sample" and not _has_prompts(folder):
        raise ConfigError(
            f"{folder.path}: its config has no prompts to sample, or sample.every = 0; begin a run with both set"
        )
    entry, raw = folder / name_of(kind), json.dumps({"ask": kind}).encode() + b"\n"
    write_atomically(entry, [raw], len(raw))
    return entry.path


def _has_prompts(folder: OpenFolder) -> bool:
    """Tells whether a run's config has what grids are made of; a config that cannot be read is left to the run."""
    try:
        with reading(folder.path / "config.toml"):
            sample: Any = table(toml_tree(folder.read("config.toml", _CONFIG).decode(errors="replace")).get("sample"))
    except (OutputError, ValueError):
        return True
    pairs = (("prompts", "prompt_file"), ("every", "every_epochs"))
    return all(sample.get(one) or sample.get(other) for one, other in pairs)


class Requests:
    """The requests in a run's folder. One that cannot be removed is told once, and never followed."""

    def __init__(self, folder: OpenFolder) -> None:
        """Removes what is left of an earlier process."""
        self._folder = folder
        self._stuck: dict[str, tuple[int, int]] = {}
        self.take()

    def take(self) -> set[Kind]:
        """Removes the requests that are there, and returns their kinds. A damaged one is named, and is none."""
        return {kind for kind in KINDS if self._taken(kind)}

    def _taken(self, kind: Kind) -> bool:
        name, raw = name_of(kind), b""
        try:
            status = self._folder.lstat(name)
            if status is None or self._stuck.get(name) == (stamp := (status.st_ino, status.st_mtime_ns)):
                return False
            self._stuck[name] = stamp
            raw = self._folder.read(name, _LARGEST)
            self._folder.remove(name)
        except OSError as error:
            _LOG.warning("%s: refused: %s; remove it", self._folder.path / name, error.strerror)
            return False
        del self._stuck[name]
        if json_tree(raw) != {"ask": kind}:
            _LOG.warning('%s: refused: expected {"ask": "%s"}, got something else', self._folder.path / name, kind)
            return False
        return True
