"""A saved command line of a trainer, such as a shell script, to its options and their lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any, Final

from flame_train.errors import ConfigError

from .shell_variables import LEFT, UNKNOWN_OPTIONS, with_values

Path = tuple[str, ...]

SCRIPT = ""
"""The key of the script's name in the tree."""

_SCRIPT = re.compile(r"[\w./\\-]*?(\w*train_network\.py)\b[\"']?")
_CONTINUED = re.compile(r"[ \t]*[\\^`][ \t]*\r?\n")
_BEFORE_ITS_END = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|[^"'\s;]|;(?=\S)|\s(?!#|\|\|?\s|&&?\s|&&?$|\d?&?>))*""")
"""A line of a command up to what the shell reads as its end, ; | & > outside quotes, or as a comment."""


class Unset(str):
    """A value with a variable of the shell that its script does not set."""

    __slots__ = ()


def script_of(text: str) -> str:
    """The script of sd-scripts that a command line in `text` starts, or ""."""
    found = _started(with_values(text))
    return found.group(1) if found else ""


def _started(text: str) -> re.Match[str] | None:
    """Where a command starts a script, in no comment and in no assignment, if such a place is there."""
    places = list(_SCRIPT.finditer(text))
    for place in places:
        line = text[text.rfind("\n", 0, place.start()) + 1 : place.start()].lstrip()
        if not line.startswith("#") and not re.match(r"\$?\w+[ \t]*=", line):
            return place
    return places[0] if places else None


def parse_command_line(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """The options of the command that `script_of` finds. Raises ConfigError for a quote that does not close.

    A switch is true, several values are a list; lines go on after \\, ^ or `, or where the next begins with a dash.
    """
    text = with_values(text)
    found = _started(text)
    assert found is not None
    tree: dict[str, Any] = {SCRIPT: found.group(1)}
    lines: dict[Path, int] = {(SCRIPT,): text.count("\n", 0, found.start()) + 1}
    line = lines[SCRIPT,]
    option, goes_on = "", True
    for raw in text[found.end() :].split("\n"):
        if not goes_on and raw.strip() and not raw.lstrip().startswith(("-", '"-', "'-", "#")):
            break  # another command
        goes_on = _CONTINUED.search(raw + "\n") is not None
        own, rest = _cut(_CONTINUED.sub("", raw + "\n").rstrip())
        for word in _words(own, f"{name}:{line}"):
            if UNKNOWN_OPTIONS.fullmatch(word):
                raise ConfigError(
                    f"{name}:{line}: {word}: expected options, got an array that this script does not set"
                )
            option = _take(tree, option, word)
            if word.startswith("--"):
                if len(tree) > _MOST:
                    raise ConfigError(f"{name}:{line}: expected a command of at most {_MOST} options, got more")
                lines[option,] = line
        if rest and not rest.startswith("#"):
            break
        line += 1
    return tree, lines


def options_of(words: Iterable[str]) -> dict[str, Any]:
    """The options in the words of a command, with their values as in `parse_command_line`."""
    tree: dict[str, Any] = {}
    option = ""
    for word in words:
        option = _take(tree, option, word)
    return tree


def _take(tree: dict[str, Any], option: str, word: str) -> str:
    """Lays the next word into `tree`, a value of `option` or an option of its own. Returns the option now."""
    if word.startswith("--"):
        option, equals, value = word[2:].partition("=")
        tree[option] = _valued(value) if equals else True
    elif option:
        _add(tree, option, _valued(word))
    return option


def _valued(word: str) -> str:
    return Unset(word) if LEFT.search(word) else word


_MOST: Final = 2000  # options; the programs have some hundred


def _cut(line: str) -> tuple[str, str]:
    """What of a line is of the command, and what comes after; a quote that does not close is of it."""
    found = _BEFORE_ITS_END.match(line)
    at = found.end() if found is not None else 0
    return (line, "") if line[at : at + 1] in ('"', "'") else (line[:at], line[at:].lstrip())


def _words(text: str, place: str) -> list[str]:
    if text.lstrip().startswith("#"):
        return []
    try:
        return shlex.split(text.replace("\\", "\\\\"), comments=False)
    except ValueError:
        raise ConfigError(f"{place}: expected a quote that closes on its line") from None


def _add(tree: dict[str, Any], option: str, word: str) -> None:
    given = tree[option]
    if given is True:
        tree[option] = word
    else:
        tree[option] = given if isinstance(given, list) else [given]
        tree[option].append(word)
