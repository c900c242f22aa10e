"""The variables of a shell script, put in where they stand: those of bash, and of PowerShell and batch files."""

from __future__ import annotations

import os
import re
from typing import Final

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
        found = _SCALAR.match(line, at + len(line[at:]) - len(line[at:].lstrip()))
        name = named.group(1)
        if found is None or "+=" in named.group():
            scalars.pop(name, None)
            return
        value = found.group(3)
        bare = _put(value[1:-1] if value[:1] in ("'", '"') else value, scalars, arrays)
        if "`" in bare or "$(" in bare or len(bare) > _LONGEST:
            scalars.pop(name, None)
        else:
            scalars[name] = bare
        rest = line[found.end() :].lstrip()
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
    """The script with each array in one line, without its comments, and as many lines as before."""
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
