"""On which line each key of a TOML text stands. `tomllib` gives values without positions.

The scanner runs after `tomllib` accepted the text, so it can trust the syntax. It finds where a key begins and where
its value ends.
"""

from __future__ import annotations

import re
import tomllib

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
        self._counted = (0, 1)  # a position and its line, so that counting never starts over

    def run(self) -> dict[Path, int]:
        table: Path = ()
        while not self._at_end():
            if self.text[self.at] == "[":
                brackets = 2 if self.text.startswith("[[", self.at) else 1
                self.at += brackets
                table = self._key(())
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

    def _key(self, table: Path) -> Path:
        """Read a possibly dotted key; note the line of each of its parts that is new."""
        path = table
        while True:
            self._skip_blank()
            line = self._line()
            path = (*path, self._key_part())
            self.lines.setdefault(path, line)
            self._skip_blank()
            if self.text[self.at] != ".":
                return path
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
        """Read an array or an inline table. Keys inside an array have no path."""
        self.at += 1
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
                self._value((*path, "[]"))
