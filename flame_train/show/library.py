"""The runs that a server shows: found below the folders that were named, each with a name and a reader."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Final

from flame_train.errors import ConfigError, shown
from flame_train.io.runlog import STATUS

from .grids import Grid, cropped
from .run_reader import RunReader, RunView

_DEPTH: Final = 3  # folders below the named one in which runs are looked for
_MOST: Final = 500  # runs
_KEPT: Final = 200  # grids whose small images stay in memory
_SMALL: Final = 320  # pixels: the longer side of an image in the table
_FULL: Final = 8192


def is_run(folder: Path) -> bool:
    """Tells whether a folder is that of a run: also of one that was copied without all of its files."""
    return (folder / STATUS).is_file() or all((folder / name).is_file() for name in ("config.toml", "log.jsonl"))


def runs_in(folder: Path) -> Iterator[Path]:
    """Yields the runs in a folder: itself, or those some levels below, in order. Links are not followed."""
    if is_run(folder):
        yield folder
        return
    yield from _below(folder, _DEPTH)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside:
        if name.startswith("."):
            continue
        if is_run(folder / name):
            yield folder / name
        elif depth > 1:
            yield from _below(folder / name, depth - 1)


class Library:
    """The runs by name. What a request names is looked up here, and is never part of a path."""

    def __init__(self, folders: Sequence[Path], empty: bool = False) -> None:
        """Raises ConfigError where there is no run in one of the folders, unless they may be `empty`."""
        self._folders = tuple(folders)
        self._readers: dict[Path, RunReader] = {}
        self._cut: OrderedDict[tuple[str, Grid], list[bytes]] = OrderedDict()
        self._lock = Lock()  # requests are answered by several threads
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(
                    f"{shown(folder)}: expected the folder of a run, or one with runs in it; got no folder"
                )
            if not empty and next(runs_in(folder), None) is None:
                raise ConfigError(
                    f"{shown(folder)}: expected the folder of a run, or one with runs in it, but found no status.json; "
                    "name the folder that output.dir of the config names"
                )

    def readers(self) -> dict[str, RunReader]:
        """Returns a reader for each run that is there now, by its name."""
        runs = dict.fromkeys(run for folder in self._folders for run in runs_in(folder))
        names = _names(list(runs)[:_MOST])
        with self._lock:
            for name, run in names.items():
                if run not in self._readers or self._readers[run].name != name:
                    self._readers[run] = RunReader(run, name)
            return {name: self._readers[run] for name, run in names.items()}

    def view(self, name: str) -> RunView | None:
        """Returns the run of that name as it stands; None: there is none."""
        reader = self.readers().get(name)
        if reader is None:
            return None
        try:
            with self._lock:
                return reader.read()
        except OSError:
            return None

    def sample(self, view: RunView, file: str, number: int, full: bool) -> bytes:
        """Gives an image of a sample grid: a small JPEG, or the whole as a PNG. Raises OSError where there is none."""
        grid = next((grid for grid in view.grids if grid.file == file), None)
        reader = self.readers().get(view.name)
        if grid is None or reader is None or not 0 <= number < len(grid.boxes):
            raise FileNotFoundError(f"no image {number} of {shown(file)}")
        if full:
            return cropped(reader.grid(grid), grid.boxes[number : number + 1], _FULL, "PNG")[0]
        with self._lock:
            if (view.name, grid) not in self._cut:  # all of the grid: the table shows them together, decoded once
                self._cut[view.name, grid] = cropped(reader.grid(grid), grid.boxes, _SMALL, "JPEG")
                while len(self._cut) > _KEPT:
                    self._cut.popitem(last=False)
            return self._cut[view.name, grid][number]

    def control(self, view: RunView, number: int) -> bytes:
        """Returns the control images of a prompt, as a small JPEG. Raises OSError where there are none."""
        reader = self.readers().get(view.name)
        if view.controls is None or reader is None or not 0 <= number < len(view.controls.boxes):
            raise FileNotFoundError(f"no control image of prompt {number}")
        return cropped(reader.controls(), view.controls.boxes[number : number + 1], _SMALL, "JPEG")[0]


def _names(runs: Sequence[Path]) -> dict[str, Path]:
    """Names the runs by the shortest ends of their paths that tell them apart."""
    whole = [run.resolve() for run in runs]
    for length in range(1, max((len(path.parts) for path in whole), default=1) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(names):
            return {shown(name): run for name, run in zip(names, runs, strict=True)}
    return {shown(path): run for path, run in zip(whole, runs, strict=True)}
