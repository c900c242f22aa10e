"""JSON text to a plain tree, and on which line each key of it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from flame_train.errors import ConfigError

Path = tuple[str, ...]

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)


def parse_json(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """The tree of `text` and the 1-based line of each key; a list at the top has the key "".

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

    def value(self, path: Path) -> Iterator[tuple[Path, int]]:
        """The path and line of every key below a value, which begins with the next token."""
        yield from self._value(next(self._tokens).group(), path)

    def _value(self, token: str, path: Path) -> Iterator[tuple[Path, int]]:
        if token == "{":
            yield from self._object(path)
        elif token == "[":
            yield from self._list(path)

    def _object(self, path: Path) -> Iterator[tuple[Path, int]]:
        while (match := next(self._tokens)).group() != "}":
            if match.group() == ",":
                continue
            below = (*path, json.loads(match.group()))
            yield below, self._line(match.start())
            next(self._tokens)  # the colon
            yield from self.value(below)

    def _list(self, path: Path) -> Iterator[tuple[Path, int]]:
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
