"""On which line each key of a TOML text stands. `tomllib` gives values without positions.

The scanner runs after `tomllib` accepted the text, so it can trust the syntax. It finds where a key begins and where
its value ends.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

Path = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'", re.DOTALL
)
_ATOM = re.compile(r"[^,\]}#\r\n]+")


def key_lines(text: str) -> dict[Path, int]:
    """The 1-based line of every table and key in `text`, valid TOML, by its path from the root."""
    return _Scanner(text).run()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self._tables: dict[Path, int] = {}  # how many tables each array of tables has so far
        self._counted = (0, 1)  # a position and its line, so that counting never starts over

    def run(self) -> dict[Path, int]:
        table: Path = ()
        while not self._at_end():
            if self.text[self.at] == "[":
                brackets = 2 if self.text.startswith("[[", self.at) else 1
                self.at += brackets
                table = self._header(brackets == 2)
                self.at += brackets
            else:
                self._pair(table)
        return self.lines

    def _at_end(self) -> bool:
        self._skip_blank()
        return self.at >= len(self.text)

    def _skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _line(self) -> int:
        position, line = self._counted
        line += self.text.count("\n", position, self.at)
        self._counted = (self.at, line)
        return line

    def _header(self, of_array: bool) -> Path:
        """Read a table's name; a table of an array has its number in its path, `[0]` for the first."""
        path: Path = ()
        for part, line in self._parts():
            if path in self._tables:
                path = (*path, f"[{self._tables[path] - 1}]")
            path = (*path, part)
            self.lines.setdefault(path, line)
        if not of_array:
            return path
        number = self._tables.get(path, 0)
        self._tables[path] = number + 1
        path = (*path, f"[{number}]")
        self.lines[path] = self._line()
        return path

    def _key(self, table: Path) -> Path:
        """Read a possibly dotted key; note the line of each of its parts that is new."""
        path = table
        for part, line in self._parts():
            path = (*path, part)
            self.lines.setdefault(path, line)
        return path

    def _parts(self) -> Iterator[tuple[str, int]]:
        """Each part of a possibly dotted key, with its line."""
        while True:
            self._skip_blank()
            line = self._line()
            yield self._key_part(), line
            self._skip_blank()
            if self.text[self.at] != ".":
                return
            self.at += 1

    def _key_part(self) -> str:
        match = _STRING.match(self.text, self.at) or _BARE_KEY.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        token = match.group()
        return str(tomllib.loads(f"v = {token}")["v"]) if token[0] in "\"'" else token

    def _pair(self, table: Path) -> None:
        path = self._key(table)
        self.at += 1  # the equals sign
        self._skip_blank()
        self._value(path)

    def _value(self, path: Path) -> None:
        opening = self.text[self.at]
        if opening in "[{":
            self._enclosed(path, "]" if opening == "[" else "}")
            return
        match = _STRING.match(self.text, self.at) or _ATOM.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _enclosed(self, path: Path, closing: str) -> None:
        """Read an array or an inline table. An array's items have their number in their path."""
        self.at += 1
        count = 0
        while True:
            self._skip_blank()
            if self.text[self.at] == closing:
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
            elif closing == "}":
                self._pair(path)
            else:
                below = (*path, f"[{count}]")
                self.lines[below] = self._line()
                self._value(below)
                count += 1
