"""A configuration file, and the files it extends, as one tree that knows where each key was written."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flame_train.config.foreign import refuse_foreign
from flame_train.config.schema import FORMAT
from flame_train.config.toml_lines import key_lines
from flame_train.config.yaml_tree import parse_yaml
from flame_train.errors import ConfigError

KeyPath = tuple[str, ...]

MAX_BYTES = 1 << 20
_MAX_LAYERS = 16
_GIVEN = "the given config"
_TEMPLATE = "; `flame-train init` writes a template"
_IN_SINGLE_QUOTES = "; between double quotes a backslash is special: use single quotes for paths with it, or / instead"


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
        tree, lines = _parse(_read_text(current, wanted_by), current)
        refuse_foreign(tree, _name(current))
        _check_format(tree, lines, current)
        chain.append((_name(current), tree, lines))
        wanted_by = f"{_name(current)}:{lines.get(('extends',), 0)}: extends: "
        current = _base_of(tree, lines, current)
    layered = Layered()
    for name, tree, lines in reversed(chain):
        _merge(layered.tree, tree)
        layered.places.update({path: f"{name}:{line}" for path, line in lines.items()})
        layered.files.append(name)
    return layered


def given_layer(tree: Mapping[str, Any]) -> Layered:
    """Sections that Python code gives, `{"train": {"steps": 10}}`; tuples are lists, paths are text."""
    sections = {
        name: {key: _plain(value) for key, value in keys.items()} if isinstance(keys, Mapping) else keys
        for name, keys in tree.items()
    }
    return Layered(sections, files=[_GIVEN])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _name(source: str) -> str:
    return "standard input" if source == "-" else source


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
    found = tree.pop("format")
    line = lines.pop(("format",))
    if found != FORMAT or isinstance(found, bool):
        raise ConfigError(
            f"{_name(source)}:{line}: format: expected {FORMAT}, the format of configs that this version reads, got "
            f"{found!r}; write a new file with `flame-train init` and copy the settings, or use the version of "
            "flame-train that wrote this one"
        )


def _base_of(tree: dict[str, Any], lines: dict[KeyPath, int], source: str) -> str | None:
    if "extends" not in tree:
        return None
    base = tree.pop("extends")
    line = lines.pop(("extends",))
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{_name(source)}:{line}: extends: expected the path of another config, got {base!r}")
    return str(Path(source).parent / os.path.expanduser(base))


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge(below[name], value)
        else:
            below[name] = value


def _read_text(source: str, wanted_by: str) -> str:
    raw = _read_bytes(source, wanted_by)
    name = _name(source)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name}: expected a configuration of at most 1 MiB, got more; is this the right file?")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{name}: expected UTF-8 text, got UTF-16; save the file as UTF-8")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        raise ConfigError(
            f"{name}:{line}: expected UTF-8 text, got the byte 0x{byte:02x}; save the file as UTF-8"
        ) from None


def _read_bytes(source: str, wanted_by: str) -> bytes:
    """The tree of a file. `wanted_by` is where another file names it, for messages."""
    if source == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    path = Path(source)
    try:
        if path.is_dir():
            raise ConfigError(f"{wanted_by}{source}: expected a configuration file, got a folder")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{wanted_by}{source}: expected a configuration file, got a device or pipe")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{wanted_by}{source}: no such file{'' if wanted_by else _TEMPLATE}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{wanted_by}{source!r}: cannot be read: {reason}") from None


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    suffix = Path(source).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return parse_yaml(text, _name(source))
    if source != "-" and suffix != ".toml":
        raise ConfigError(f"{source}: expected a file ending in .toml, .yaml or .yml, got {suffix or 'no ending'}")
    try:
        return tomllib.loads(text), key_lines(text)
    except RecursionError:
        raise ConfigError(f"{_name(source)}: expected TOML, got values nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, or a number Python refuses to convert
        raise ConfigError(_toml_error(str(error), _name(source), text)) from None


def _toml_error(message: str, name: str, text: str) -> str:
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    if found is None:
        return f"{name}: expected TOML, got: {message}"
    lines = text.splitlines() or [""]
    line = int(found.group(1) or len(lines))
    hint = _IN_SINGLE_QUOTES if re.search(r'"[^"]*\\', lines[line - 1]) else ""
    return f"{name}:{line}: expected TOML, got a syntax error: {message[: found.start()]}{hint}"
