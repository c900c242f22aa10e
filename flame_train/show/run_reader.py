"""Reads a run from its folder: for the live page again and again, for `report.html` at each checkpoint.

It reads what a run wrote and nothing else: plain files below the folder, no links. A file that is not there, is cut
short or makes no sense leaves its part of the page empty.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from flame_train.config.keys import keys
from flame_train.config.render import toml_value
from flame_train.disk.open_folder import OpenFolder
from flame_train.errors import OutputError
from flame_train.io.commit import is_checkpoint
from flame_train.io.json_values import number, table, toml_tree, whole
from flame_train.io.runlog import STATUS, is_locked, mark_dead, read_status

from .curves import Curve, LogCurves
from .grids import Grid, GridPrompt, cut, cut_controls, prompts_of, size_of, step_of_grid
from .trained_images import CONTROLS, SHEET, Band, TrainedImage, bands_of, cells_in, images_of, with_losses

_LARGEST: Final = 1 << 28  # bytes of a file that is read whole
_LONGEST: Final = 1e9  # seconds: a pace that means more time than this is none


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file or folder of the run: its name below the run folder, and its bytes; a folder's are summed up."""

    name: str
    size: int
    folder: bool = False


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as it stands. `curves` are by name as in `curves.py`; `steps` is the length of the run, 0: unknown.

    `unshown` counts grids that are too large, or damaged. `controls` has the control images of each prompt; None: there
    are none. `images_written` is another value where the files of the images were written again. `changed` is when it
    wrote last, in seconds since 1970; 0: unknown.
    """

    name: str
    folder: Path
    status: Mapping[str, Any]
    steps: int
    curves: Mapping[str, Curve]
    last: Mapping[str, Any]
    settings: tuple[Setting, ...]
    prompts: tuple[GridPrompt, ...]
    grids: tuple[Grid, ...]
    unshown: int
    controls: Grid | None
    images: tuple[TrainedImage, ...]
    images_written: object
    bands: tuple[Band, ...]
    files: tuple[KeptFile, ...]
    changed: float

    @property
    def seconds_left(self) -> float | None:
        """The time that the steps left take at the present pace; None: the run does not go on, or nobody knows."""
        pace = number(self.status.get("steps_per_s")) or 0.0
        if self.status.get("state") != "running" or pace <= 0.0 or not self.steps:
            return None
        steps_left = max(self.steps - self.step, 0) / pace
        return steps_left if steps_left < _LONGEST else None

    @property
    def step(self) -> int:
        """The steps done, as the log and the status have it."""
        return max(whole(each.get("step")) or 0 for each in (self.last, self.status))

    @property
    def best(self) -> tuple[float, float] | None:
        """The step of the lowest validation loss, the first of them, and that loss; None: nothing was validated."""
        curve = self.curves.get("validation/loss")
        return min(zip(curve.steps, curve.values, strict=True), key=lambda point: point[1]) if curve else None

    @property
    def weighted(self) -> bool:
        """Whether the loss has weights, which the validation loss lacks."""
        return self.setting("loss.weighting") not in ("", '"none"')

    def setting(self, path: str) -> str:
        """Returns the value of a key as TOML; empty: the config lacks it."""
        return next((setting.value for setting in self.settings if setting.path == path), "")


class RunReader:
    """Reads one run. `name` is what the page calls it. Parts whose file is as it was are not read again."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name or folder.resolve().name
        self._log = LogCurves()
        self._kept: dict[tuple[str, str], tuple[Any, Any]] = {}

    def read(self) -> RunView:
        """Returns the run as it stands. Raises OSError where the folder cannot be opened."""
        with OpenFolder.open(self.folder) as folder:
            self._read_log(folder)
            tree, settings = self._part(folder, "config.toml", _config)
            prompts = prompts_of(tree)
            room = self._part(folder, SHEET, cells_in)
            listed = self._part(folder, "dataset.json", lambda raw: images_of(raw, room), room)
            images, bands = self._part(
                folder, "images.json", lambda raw: (with_losses(listed, raw), bands_of(raw)), listed
            )
            grids, unshown = self._grids(folder, prompts)
            return RunView(
                name=self.name,
                folder=self.folder,
                status=_status(folder),
                steps=whole(table(tree.get("train")).get("steps")) or 0,
                curves={name: curve.copy() for name, curve in self._log.curves.items()},
                last=self._log.last,
                settings=settings,
                prompts=prompts,
                grids=grids,
                unshown=unshown,
                controls=self._controls(folder, prompts),
                images=images,
                images_written=(_stamp(folder, "dataset.json"), _stamp(folder, "images.json"), room),
                bands=bands,
                files=tuple(_files(folder)),
                changed=max((_stamp(folder, name) or (0,))[0] for name in (STATUS, "log.jsonl")) / 1e9,
            )

    def grid(self, grid: Grid) -> bytes:
        """Returns the file of a grid. Raises OSError."""
        with OpenFolder.open(self.folder) as folder, folder.folder("samples") as samples:
            return samples.read(grid.file, _LARGEST)

    def controls(self) -> bytes:
        """Returns the sheet of control images. Raises OSError."""
        with OpenFolder.open(self.folder) as folder:
            return folder.read(CONTROLS, _LARGEST)

    def sheet(self) -> bytes:
        """Returns the sheet of thumbnails. Raises OSError."""
        with OpenFolder.open(self.folder) as folder:
            return folder.read(SHEET, _LARGEST)

    def _read_log(self, folder: OpenFolder) -> None:
        try:
            self._log.read(folder)
        except OSError:
            self._log = LogCurves()

    def _part(self, folder: OpenFolder, name: str, make: Callable[[bytes], Any], of: object = None) -> Any:
        """Calls `make` on a file's bytes, none without a file; kept until the file or `of`, the rest of it, changes."""
        stamps, key = (_stamp(folder, name), of), (folder.path.name, name)
        if self._kept.get(key, (None, None))[0] != stamps:
            self._kept[key] = stamps, make(_bytes(folder, name))
        return self._kept[key][1]

    def _grids(self, folder: OpenFolder, prompts: tuple[GridPrompt, ...]) -> tuple[tuple[Grid, ...], int]:
        grids, unshown = [], 0
        try:
            with folder.folder("samples") as samples:
                for name in samples.names():
                    if (found := step_of_grid(name)) is not None:
                        size = self._part(samples, name, size_of)
                        written = (_stamp(samples, name) or (0,))[0]
                        unshown += size is None
                        grids += [] if size is None else [Grid(found[0], cut(size, prompts), written, found[1], name)]
        except OSError:
            return (), 0
        return tuple(sorted(grids, key=lambda grid: (grid.step, not grid.of_base))), unshown

    def _controls(self, folder: OpenFolder, prompts: tuple[GridPrompt, ...]) -> Grid | None:
        size = self._part(folder, CONTROLS, size_of)
        return None if size is None else cut_controls(size, prompts, (_stamp(folder, CONTROLS) or (0,))[0])


def _config(raw: bytes) -> tuple[dict[str, Any], tuple[Setting, ...]]:
    tree = tree_of(raw.decode(errors="replace"))
    return tree, settings_of(tree)


def _status(folder: OpenFolder) -> Mapping[str, Any]:
    try:
        status = read_status(folder)
    except OutputError:
        return {}
    return status if is_locked(folder) else mark_dead(status)


def _stamp(folder: OpenFolder, name: str) -> tuple[int, int, int] | None:
    try:
        status = folder.lstat(name)
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)


def _bytes(folder: OpenFolder, name: str) -> bytes:
    try:
        return folder.read(name, _LARGEST)
    except OSError:
        return b""


def _files(folder: OpenFolder) -> list[KeptFile]:
    """Returns what lies right in the folder, and the checkpoints with their files summed up."""
    entries = []
    for name in folder.names():
        status = folder.lstat(name)
        if status is None or name.startswith("."):
            continue
        if name in ("checkpoints", "samples"):
            entries += _inside(folder, name)
        else:
            entries.append(KeptFile(name, status.st_size, not stat.S_ISREG(status.st_mode)))
    return entries


def _inside(folder: OpenFolder, kind: str) -> list[KeptFile]:
    entries = []
    try:
        with folder.folder(kind) as inside:
            for name in inside.names():
                status = inside.lstat(name)
                if status is None:
                    continue
                if kind == "checkpoints" and is_checkpoint(name):
                    with inside.folder(name) as checkpoint:
                        sizes = [checkpoint.lstat(file) for file in checkpoint.names()]
                    size = sum(each.st_size for each in sizes if each is not None)
                    entries.append(KeptFile(f"{kind}/{name}", size, True))
                elif step_of_grid(name) is not None if kind == "samples" else name.endswith(".safetensors"):
                    entries.append(KeptFile(f"{kind}/{name}", status.st_size))
    except OSError:
        return entries
    return entries


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the config, its value as TOML writes it. `default` is None for a key that this version lacks."""

    path: str
    value: str
    default: str | None
    doc: str

    @property
    def differs(self) -> bool:
        """Whether the value is another than the default."""
        return self.default is not None and self.value != self.default


def tree_of(text: str) -> dict[str, Any]:
    """Returns the tables of a `config.toml`; none if it makes no sense."""
    try:
        return toml_tree(text)
    except ValueError:
        return {}


def settings_of(tree: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Returns every key of a resolved config, in the order of its file."""
    values = dict(_flat(tree))
    return tuple(_setting(path, value, values) for path, value in values.items())


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in tree.items():
        if isinstance(values, Mapping):
            yield from ((f"{section}.{name}", value) for name, value in values.items())


def _setting(path: str, value: Any, values: Mapping[str, Any]) -> Setting:
    key = keys().get(path)
    if key is None:
        return Setting(path, toml_value(value), None, "")
    return Setting(path, toml_value(value), toml_value(key.default_among(values)), key.doc)


def without_folders(setting: Setting) -> Setting:
    """Returns the setting with files and folders by their last name: a report may be sent to others."""
    key = keys().get(setting.path)
    if key is None or not (key.place or key.table_places):
        return setting
    try:
        value = toml_tree(f"value = {setting.value}")["value"]
    except ValueError:
        return setting

    def shortened(one: Any) -> Any:
        return key.with_places(one, lambda place: PurePath(place).name)

    if key.place or not isinstance(value, list):
        changed = shortened(value)
    else:  # tables, and texts that stand for tables
        changed = [shortened([each])[0] if isinstance(each, Mapping) else each for each in value]
    return Setting(setting.path, toml_value(changed), setting.default, setting.doc)
