"""Reads a saved command line of a trainer, such as a shell script: its variables, its options and their lines."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from typing import Any, Final

from flame_train.errors import ConfigError

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
    """Returns the script of sd-scripts that a command line in `text` starts, or ""."""
    command = _started(with_values(text))
    return command.group(1) if command else ""


def _started(text: str) -> re.Match[str] | None:
    """Says where a command starts a script, in no comment and in no assignment, if such a place is there."""
    places = list(_SCRIPT.finditer(text))
    for place in places:
        line = text[text.rfind("\n", 0, place.start()) + 1 : place.start()].lstrip()
        if not line.startswith("#") and not re.match(r"\$?\w+[ \t]*=", line):
            return place
    return places[0] if places else None


def parse_command_line(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    r"""Returns the options of the command that `script_of` finds. Raises ConfigError for a quote that does not close.

    A switch is true, several values are a list; lines go on after \, ^ or `, or where the next begins with a dash.
    """
    text = with_values(text)
    command = _started(text)
    assert command is not None
    tree: dict[str, Any] = {SCRIPT: command.group(1)}
    lines: dict[Path, int] = {(SCRIPT,): text.count("\n", 0, command.start()) + 1}
    line = lines[SCRIPT,]
    option, goes_on = "", True
    for raw in text[command.end() :].split("\n"):
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
    """Returns the options in the words of a command, with their values as in `parse_command_line`."""
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
    """Says what of a line is of the command, and what comes after; a quote that does not close is of it."""
    match = _BEFORE_ITS_END.match(line)
    at = match.end() if match is not None else 0
    return (line, "") if line[at : at + 1] in ('"', "'") else (line[:at], line[at:].lstrip())


def _words(text: str, place: str) -> list[str]:
    if text.lstrip().startswith("#"):
        return []
    try:
        return shlex.split(text.replace("\\", "\\\\"), comments=False)
    except ValueError:
        raise ConfigError(f"{place}: expected a quote that closes on its line") from None


def _add(tree: dict[str, Any], option: str, word: str) -> None:
    values = tree[option]
    if values is True:
        tree[option] = word
    else:
        tree[option] = values if isinstance(values, list) else [values]
        tree[option].append(word)


_MARK: Final = r"(?:(?:export|readonly|set)[ \t]+)?"
_QUOTED: Final = r'"[^"\n]*"|\'[^\'\n]*\''
_SCALAR: Final = re.compile(
    rf"{_MARK}(?:([A-Za-z_]\w*)=|\$(\w+)[ \t]*=[ \t]*)({_QUOTED}|[^\s;#\"'(]*)(?=[ \t]*(?:[;#\r]|$|[ \t]#))"
)
_ARRAY: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=\((.*)\)$")
_ARRAY_BEGINS: Final = re.compile(r"[A-Za-z_]\w*\+?=\(")
_NAMED: Final = re.compile(r"[ \t]*(?:(?:export|readonly|set|local|declare)[ \t]+)?\$?([A-Za-z_]\w*)[ \t]*\+?=")
_SPREAD: Final = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_USED: Final = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)|%(\w+)%")
_LONGEST: Final = 4000  # characters of a value; one made of itself, line by line, would double
_DEEPEST: Final = 4  # defaults within defaults
LEFT: Final = re.compile(r"\$\{?[A-Za-z_]|\$\(|%[A-Za-z_]\w*%")
"""A variable or a command of the shell whose value no script tells."""

UNKNOWN_OPTIONS: Final = re.compile(r"\$\{\w+\[[@*]\]\}")


def with_values(text: str) -> str:
    """Puts the variables that a script sets into its lines; one that only a branch or a command sets stays as it is."""
    scalars: dict[str, str] = {name: os.environ[name] for name in ("HOME",) if name in os.environ}
    arrays: dict[str, str] = {}
    lines = _joined_arrays(text).split("\n")
    for i, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            continue
        if (array := _ARRAY.match(line)) is not None:
            name, adds, words = array.groups()
            arrays[name] = f"{arrays.get(name, '') if adds else ''} {_put(words, scalars, arrays)}".strip()
            continue
        if line[:1].isspace() and (named := _NAMED.match(line)) is not None:
            scalars.pop(named.group(1), None)  # inside a branch, a loop or a function
            continue
        if _NAMED.match(line) is not None:
            _assign(line, scalars, arrays)
        else:
            lines[i] = _put(line, scalars, arrays)
    return "\n".join(lines)


def _assign(line: str, scalars: dict[str, str], arrays: dict[str, str]) -> None:
    """Takes the assignments of one line, which semicolons part."""
    at = 0
    while (named := _NAMED.match(line, at)) is not None:
        match = _SCALAR.match(line, at + len(line[at:]) - len(line[at:].lstrip()))
        name = named.group(1)
        if match is None or "+=" in named.group():
            scalars.pop(name, None)
            return
        value = match.group(3)
        bare = _put(value[1:-1] if value[:1] in ("'", '"') else value, scalars, arrays)
        if "`" in bare or "$(" in bare or len(bare) > _LONGEST:
            scalars.pop(name, None)
        else:
            scalars[name] = bare
        rest = line[match.end() :].lstrip()
        if not rest.startswith(";"):
            return
        at = len(line) - len(rest) + 1


def _put(text: str, scalars: dict[str, str], arrays: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found.group(1) or found.group(3) or found.group(4)
        if known := scalars.get(name):
            return known
        default = found.group(2)
        if default is not None:
            return default.strip("\"'")
        return scalars.get(name, found.group())

    text = _SPREAD.sub(lambda found: arrays.get(found.group(1), found.group()), text)
    for _ in range(_DEEPEST):
        before, text = text, _USED.sub(value, text)
        if text == before or len(text) > _LONGEST:
            break
    return text


def _joined_arrays(text: str) -> str:
    """Returns the script with each array in one line, without its comments, and as many lines as before."""
    lines = text.split("\n")
    begun, words = -1, list[str]()
    for i, line in enumerate(lines):
        if begun < 0 and _ARRAY_BEGINS.match(line) is None:
            continue
        begun, bare = (begun if begun >= 0 else i), "" if line.lstrip().startswith("#") else line.strip()
        words.append(bare)
        lines[i] = ""
        if bare.endswith(")"):
            lines[begun] = " ".join(word for word in words if word)
            begun, words = -1, []
    return "\n".join(lines) if begun < 0 else text
