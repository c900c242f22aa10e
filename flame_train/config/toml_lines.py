"""On which line each key of a TOML text stands. `tomllib` gives values without positions.

The scanner runs after `tomllib` accepted the text, so it can trust the syntax. It finds where a key begins and where
its value ends.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Final, NamedTuple

from flame_train.errors import shown

Path = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'", re.DOTALL
)
_ATOM = re.compile(r"[^,\]}#\r\n]+")


def key_spans(text: str) -> tuple[dict[Path, Span], dict[Path, int]]:
    """Returns where each pair of a key and a value stands in `text`, valid TOML, and where each table ends."""
    scanner = _Scanner(text)
    scanner.run()
    return scanner.spans, scanner.ends


def key_lines(text: str) -> dict[Path, int]:
    """Returns the 1-based line of every table and key in `text`, valid TOML, by its path from the root."""
    return _Scanner(text).run()


class Span(NamedTuple):
    """Positions in a text: where a key begins, where its value does, and where that ends."""

    key: int
    value: int
    end: int


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.spans: dict[Path, Span] = {}
        self.ends: dict[Path, int] = {}
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
                self.ends[table] = self.at
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
        start = self.at
        path = self._key(table)
        self.at += 1  # the equals sign
        self._skip_blank()
        value = self.at
        self._value(path)
        end = value + len(self.text[value : self.at].rstrip())  # blanks may follow a number
        self.spans[path], self.ends[table] = Span(start, value, end), self.at

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


_PLACE: Final = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_LONGEST: Final = 60  # characters of a line that are shown
_QUOTES: Final = "put text into quotes"
_SLASHES: Final = "between double quotes a backslash is special: use single quotes for paths with it, or / instead"
_AGAIN: Final = "Cannot|Duplicate"
# how a reason of tomllib begins -> what was expected, what to do
_REASONS: Final = (
    ("Invalid value", "a value", f"{_QUOTES}; numbers, true, false and lists in [ ] have none"),
    ("Expected '=' after a key", "= after the key", "write each setting as key = value"),
    (
        "Expected newline or end",
        "the end of the line",
        f"{_QUOTES}, decimals with a point, and each key on its own line",
    ),
    ("Invalid statement", "a key, a [section] or a # comment", "write each setting as key = value"),
    ("Invalid initial character", "a name", "name sections and keys with letters, digits and _"),
    ("Expected ']]' at the end", "]] behind the name", "write [[name]] on a line of its own"),
    ("Expected ']' at the end", "] behind the section's name", "write [section] on a line of its own"),
    (_AGAIN, "each key and section once", "keep one of the two"),
    ("Unclosed array", "a comma or the ] of a list", "close the list"),
    ("Unclosed inline table", "a comma or the } of a table", "close the table"),
    (r"Unescaped|Invalid hex value|Escaped character", "text without a single backslash", _SLASHES),
    (r"Illegal character '\\n'|Unterminated string|Expected \"", "the quote that ends the text", "close the text"),
    (r"Expected '", "the quote that ends the text", "close the text"),
    ("Illegal character|Found invalid character", "printable characters", "remove the character that cannot be seen"),
    ("Invalid date", "a date of the calendar", "correct it"),
)

_LONG_NUMBER: Final = re.compile(r"\b\w{1000,}\b")


def toml_error(reason: str, name: str, text: str) -> str:
    """Returns the message for a `text` that `tomllib` refused for this `reason`: line, column, and the line itself."""
    place = _PLACE.search(reason)
    if place is None:  # Python's limit on the digits of a number
        huge = _LONG_NUMBER.search(text)
        line = f":{1 + text.count(chr(10), 0, huge.start())}" if huge else ""
        return f"{name}{line}: expected TOML, got a number of too many digits; write a shorter one"
    lines = text.rstrip("\n").split("\n")
    number = int(place[1] or len(lines))
    line = lines[number - 1] if number <= len(lines) else ""
    column = int(place[2] or len(line) + 1)
    expected, advice = _words(reason)
    if re.match(_AGAIN, reason):
        found = "one again"
    else:
        found = _cut(line[column - 1 :].strip()) or f"the end of the {'line' if place[1] else 'file'}"
    cited = f" in the line `{_cut(line.strip())}`" if line.strip() else ""
    return f"{name}:{number}:{column}: expected {expected}, got {found}{cited}; {advice}"


def _words(reason: str) -> tuple[str, str]:
    fitting = (words for beginning, *words in _REASONS if re.match(beginning, reason))
    expected, advice = next(fitting, ("TOML", "correct the line"))
    return expected, advice


def _cut(line: str) -> str:
    return shown(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")
