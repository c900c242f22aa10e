"""A sweep's file: one config, and a grid or a list of settings over it, each of which is a run with a folder."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flame_train.config.keys import keys
from flame_train.config.load import load_located
from flame_train.config.parse import parse, read_text
from flame_train.config.render import toml_value
from flame_train.config.schema import Config
from flame_train.errors import ConfigError
from flame_train.io.addresses import problem_of

_KEYS: Final = ("config", "folder", "remote", "grid", "runs", "slurm")
PLACES: Final = ("output.dir", "output.remote")
"""The keys that a sweep sets itself, another for each run."""
_LONGEST: Final = 100  # characters of a run's name
_MOST: Final = 10_000
_OTHER: Final = re.compile(r"[^A-Za-z0-9.+-]+")


@dataclass(frozen=True, slots=True)
class Planned:
    """One run: its name, which its folder has, its overrides as `--set` takes them, and its settings."""

    name: str
    overrides: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.dir)


@dataclass(frozen=True, slots=True)
class Sweep:
    """All runs of a sweep, each checked as far as its config goes.

    Attributes:
        file: the sweep's file.
        config: the config that all runs have in common.
        folder: where the run folders are made.
        runs: the runs, in their order.
        slurm: lines for the script, such as `--partition=gpu`.
    """

    file: Path
    config: str
    folder: Path
    runs: tuple[Planned, ...]
    slurm: tuple[str, ...]


def read_sweep(file: Path) -> Sweep:
    """Reads a sweep's file. Raises ConfigError with everything that is wrong in it or in one of its runs."""
    tree, at = parse(read_text(str(file)), str(file))
    unknown = [name for name in tree if name not in _KEYS]
    if unknown:
        raise ConfigError(f"{file}: {unknown[0]}: unknown key; a sweep has {', '.join(_KEYS)}")
    for name in ("config", "folder"):
        if not isinstance(tree.get(name), str) or not tree[name] or not tree[name].isprintable():
            line = f":{at[(name,)]}" if (name,) in at else ""
            raise ConfigError(
                f"{file}{line}: {name}: expected a path of printable characters, got {tree.get(name, 'nothing')!r}"
            )
    remote, lines = tree.get("remote", ""), tree.get("slurm", [])
    if not isinstance(remote, str) or (remote and (wrong := problem_of(remote))):
        raise ConfigError(f"{file}: remote: {wrong if isinstance(remote, str) else 'expected an address'}")
    if not isinstance(lines, list) or not all(map(_is_option, lines)):
        raise ConfigError(
            f'{file}:{at[("slurm",)]}: slurm: expected a list of options such as "--partition=gpu", each on one line'
        )
    chosen = list(_settings(file, tree))
    config, folder = str(file.parent / tree["config"]), Path(tree["folder"])
    runs, problems = list[Planned](), list[str]()
    for name, settings in zip(_names(chosen), [values for _, values in chosen], strict=True):
        overrides = [f"{path}={toml_value(value)}" for path, value in settings.items()]
        overrides.append(f"output.dir={toml_value(str(folder / name))}")
        overrides += ["output.remote=" + toml_value(f"{remote.rstrip('/')}/{name}")] if remote else []
        try:
            runs.append(Planned(name, tuple(overrides), load_located(config, overrides).config))
        except ConfigError as error:
            problems += [f"{name}: {line}" for line in str(error).splitlines()]
    twice = [name for name in {run.name for run in runs} if sum(run.name == name for run in runs) > 1]
    if twice:
        problems.append(f"{file}: two runs are called {twice[0]}; give them the key name, or other settings")
    hubs = [run.config.output.hub for run in runs if run.config.output.hub]
    if len({*hubs}) < len(hubs):
        problems.append(f"{file}: output.hub: runs would write over each other there; `flame-train publish` takes one")
    if problems:
        raise ConfigError("\n".join(problems))
    return Sweep(file, config, folder, tuple(runs), tuple(lines))


def _is_option(line: object) -> bool:
    return isinstance(line, str) and line.startswith("-") and line.isprintable()


def _settings(file: Path, tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the settings of each run by their paths, with the name that the file gives it, if any."""
    grid, runs = tree.get("grid"), tree.get("runs")
    if (grid is None) == (runs is None):
        raise ConfigError(f"{file}: expected a table [grid] or tables [[runs]], got {'both' if grid else 'neither'}")
    if isinstance(grid, dict):
        values = _flat(file, "grid", grid)
        wrong = next((path for path, listed in values.items() if not isinstance(listed, list) or not listed), None)
        if wrong or not values:
            raise ConfigError(f"{file}: grid.{wrong or ''}: expected a list of values, such as [1e-4, 5e-5]")
        if (count := math.prod(map(len, values.values()))) > _MOST:
            raise ConfigError(f"{file}: grid: expected at most {_MOST} combinations, got {count}")
        for combination in itertools.product(*values.values()):
            yield "", dict(zip(values, combination, strict=True))
        return
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise ConfigError(f"{file}: expected a table [grid] of lists, or tables [[runs]]")
    if len(runs) > _MOST:
        raise ConfigError(f"{file}: expected at most {_MOST} runs, got {len(runs)}")
    for number, run in enumerate(runs, 1):
        name = run.get("name", "")
        if not isinstance(name, str) or _OTHER.search(name) or name.startswith("."):
            raise ConfigError(f"{file}: runs {number}: name: expected letters, digits and . + - alone, got {name!r}")
        yield name, _flat(file, f"runs {number}", {key: value for key, value in run.items() if key != "name"})


def _flat(file: Path, where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Lists settings by their paths, which may be written with a dot or as tables."""
    settings = dict[str, Any]()
    for name, value in table.items():
        inner = {f"{name}.{key}": listed for key, listed in value.items()} if isinstance(value, dict) else {name: value}
        settings |= inner
    for path in settings:
        if path in PLACES:
            raise ConfigError(f"{file}: {where}: {path}: folder and remote say where a run is; remove it")
        if path not in keys():
            raise ConfigError(f"{file}: {where}: {path}: unknown key; `flame-train init FAMILY` writes all there are")
    return settings


def _names(chosen: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Gives each run a name: its own, or what differs among them, as in lr-1e-05_rank-8."""
    paths = list(dict.fromkeys(path for _, settings in chosen for path in settings))
    differing = [path for path in paths if len({repr(settings.get(path)) for _, settings in chosen}) > 1] or paths
    last = [path.rpartition(".")[2] for path in differing]
    short = {path: name if last.count(name) == 1 else path for path, name in zip(differing, last, strict=True)}
    return [
        given_name
        or _fitted("_".join(_part(short[path], settings[path]) for path in differing if path in settings) or "base")
        for given_name, settings in chosen
    ]


def _part(name: str, value: Any) -> str:
    text = toml_value(value).strip('"')
    return f"{name}-{_OTHER.sub('-', text).strip('-.')}"


def _fitted(name: str) -> str:
    """Shortens a name to one that a folder can have; a long one ends with its hash."""
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
