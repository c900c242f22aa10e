"""The text of a config file, and its tree with the line of each key: TOML, YAML or JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flame_train.config.toml_lines import key_lines, toml_error
from flame_train.config.yaml_tree import parse_yaml
from flame_train.errors import ConfigError
from flame_train.io.json_values import TooDeep, toml_tree

KeyPath = tuple[str, ...]

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def parse_json(text: str, name: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Returns the tree of `text` and the 1-based line of each key; a list at the top has the key "".

    `name` is the file's, for messages. Raises ConfigError for a syntax error, with its line.
    """
    try:
        tree = json.loads(text)
        at = ("",) if isinstance(tree, list) else ()
        lines = dict(_Scanner(text).value(at))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}: expected JSON, got a syntax error: {error.msg}") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: expected JSON: {error}") from None
    if isinstance(tree, list):
        return {"": tree}, lines
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}:1: expected an object with keys, got {type(tree).__name__}")
    return tree, lines


class _Scanner:
    """Walks over the tokens of valid JSON."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _TOKEN.finditer(text)
        self._counted = (0, 1)  # a position and its line, so that counting never starts over

    def value(self, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        """Yields the path and line of every key below a value, which begins with the next token."""
        yield from self._value(next(self._tokens).group(), path)

    def _value(self, token: str, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        if token == "{":
            yield from self._object(path)
        elif token == "[":
            yield from self._list(path)

    def _object(self, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        while (match := next(self._tokens)).group() != "}":
            if match.group() == ",":
                continue
            below = (*path, json.loads(match.group()))
            yield below, self._line(match.start())
            next(self._tokens)  # the colon
            yield from self.value(below)

    def _list(self, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        count = 0
        while (match := next(self._tokens)).group() != "]":
            if match.group() == ",":
                continue
            below = (*path, f"[{count}]")
            yield below, self._line(match.start())
            yield from self._value(match.group(), below)
            count += 1

    def _line(self, start: int) -> int:
        position, line = self._counted
        line += self._text.count("\n", position, start)
        self._counted = (start, line)
        return line


MAX_BYTES = 1 << 20
_TEMPLATE = "; `flame-train init` writes a template"


def name_of(source: str) -> str:
    """Returns how messages name a file."""
    return "standard input" if source == "-" else source


def read_text(source: str, wanted_by: str = "") -> str:
    """Returns the text of a file, or of standard input for "-".

    `wanted_by` is where another file names it, for messages.

    Raises ConfigError for a file that is missing, unreadable, too large or not UTF-8.
    """
    raw = _read_bytes(source, wanted_by)
    name = name_of(source)
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
    """Returns the tree of a file. `wanted_by` is where another file names it, for messages."""
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


def parse(text: str, source: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Returns the tree of a text and the line of each key, as YAML, JSON or TOML by the ending of `source`."""
    suffix = Path(source).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return parse_yaml(text, name_of(source))
    if suffix == ".json":
        return parse_json(text, name_of(source))
    try:
        return toml_tree(text), key_lines(text)
    except TooDeep as error:
        raise ConfigError(f"{name_of(source)}: {error}, got more; is this the right file?") from None
    except ValueError as error:  # TOMLDecodeError, or a number Python refuses to convert
        raise ConfigError(toml_error(str(error), name_of(source), text)) from None
