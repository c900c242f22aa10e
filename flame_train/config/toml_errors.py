"""What is wrong with a text that is no TOML: what was expected, what stands there, and what to do about it.

`tomllib` says where it stopped, and in a few fixed words why. The words are read here, and never shown.
"""

from __future__ import annotations

import re
from typing import Final

from flame_train.errors import shown

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
    """The message for a `text` that `tomllib` refused for this `reason`; `name` is the file's.

    It names line and column, and cites the line.
    """
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
    """What was expected, and what to do."""
    fitting = (words for beginning, *words in _REASONS if re.match(beginning, reason))
    expected, advice = next(fitting, ("TOML", "correct the line"))
    return expected, advice


def _cut(line: str) -> str:
    return shown(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")
