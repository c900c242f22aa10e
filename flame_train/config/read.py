"""A configuration file, and the files it extends, as one tree that knows where each key was written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flame_train.config.foreign.recognize import foreign_text, refuse_foreign
from flame_train.config.parse import name_of, parse, read_text
from flame_train.config.schema import FORMAT
from flame_train.errors import ConfigError

KeyPath = tuple[str, ...]

_MAX_LAYERS = 16
_GIVEN = "the given config"


@dataclass(slots=True)
class Layered:
    """The merged tree of a file over the files it extends.

    `places` maps each key's path to `file:line`, the last file to set it winning; `files` lists the files,
    the most basic first.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def read_layers(source: str) -> Layered:
    """Read `source` (a .toml, .yaml or .yml path, or `-` for TOML on standard input) over the configs that it extends.

    `extends = "other.toml"` is relative to the file that says so. Tables merge; anything else replaces.
    Raises ConfigError for a file that is missing, unreadable, too large, not UTF-8, or not TOML/YAML.
    """
    chain: list[tuple[str, dict[str, Any], dict[KeyPath, int]]] = []
    seen: list[Path] = []
    current: str | None = os.path.expanduser(source)
    wanted_by = ""
    while current is not None:
        _refuse_path(current, seen)
        tree, lines = _parse_own(current, wanted_by)
        _check_format(tree, lines, current)
        chain.append((name_of(current), tree, lines))
        wanted_by = f"{name_of(current)}:{lines.get(('extends',), 0)}: extends: "
        current = _base_of(tree, lines, current)
    layered = Layered()
    for name, tree, lines in reversed(chain):
        _merge(layered.tree, tree)
        layered.places.update({path: f"{name}:{line}" for path, line in lines.items()})
        layered.files.append(name)
    return layered


def text_layer(text: str, name: str) -> Layered:
    """Returns a text in TOML, called `name` in messages. Raises ConfigError: also where it extends another file."""
    tree, lines = parse(text, name)
    refuse_foreign(tree, name)
    _check_format(tree, lines, name)
    if "extends" in tree:
        raise ConfigError(f"{name}:{lines['extends',]}: extends: expected all settings in one text; copy them into it")
    return Layered(tree, {path: f"{name}:{line}" for path, line in lines.items()}, [name])


def given_layer(tree: Mapping[str, Any]) -> Layered:
    """Sections that Python code gives, `{"train": {"steps": 10}}`; tuples are lists, paths are text."""
    sections = {
        name: {key: _plain(value) for key, value in keys.items()} if isinstance(keys, Mapping) else keys
        for name, keys in tree.items()
    }
    _check_format(sections, {}, _GIVEN)
    return Layered(sections, files=[_GIVEN])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _refuse_path(source: str, seen: list[Path]) -> None:
    if "\0" in source:
        raise ConfigError(f"{source!r}: expected the path of a configuration file, got a NUL character in it")
    path = Path(source).absolute() if source == "-" else Path(source).resolve()
    if path in seen:
        raise ConfigError(f"{source}: expected a chain of extends that ends, but it comes back to this file")
    if len(seen) == _MAX_LAYERS:
        raise ConfigError(f"{source}: expected at most {_MAX_LAYERS} files that extend one another")
    seen.append(path)


def _check_format(tree: dict[str, Any], lines: dict[KeyPath, int], source: str) -> None:
    """Takes `format` out of the tree. A file without one has the present format."""
    if "format" not in tree:
        return
    number = tree.pop("format")
    line = lines.pop(("format",), None)
    if number != FORMAT or isinstance(number, bool):
        place = name_of(source) if line is None else f"{name_of(source)}:{line}"
        raise ConfigError(
            f"{place}: format: expected {FORMAT}, the format of configs that this version reads, got {number!r}; write "
            "a new file with `flame-train init` and copy the settings, or use the version of flame-train that wrote "
            "this one"
        )


def _base_of(tree: dict[str, Any], lines: dict[KeyPath, int], source: str) -> str | None:
    if "extends" not in tree:
        return None
    base = tree.pop("extends")
    line = lines.pop(("extends",))
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{name_of(source)}:{line}: extends: expected the path of another config, got {base!r}")
    return str(Path(source).parent / os.path.expanduser(base))


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge(below[name], value)
        else:
            below[name] = value


def _parse_own(source: str, wanted_by: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Returns the tree of a config of ours; another trainer's is refused by name, whatever its ending."""
    text = read_text(source, wanted_by)
    ending = Path(source).suffix.lower()
    if source != "-" and ending not in (".toml", ".yaml", ".yml"):
        if foreign := foreign_text(text, source):
            raise foreign
        raise ConfigError(f"{source}: expected a file ending in .toml, .yaml or .yml, got {ending or 'no ending'}")
    tree, lines = parse(text, source)
    refuse_foreign(tree, name_of(source))
    return tree, lines
