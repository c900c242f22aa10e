"""A saved command line of a trainer, such as a shell script, to its options and their lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any, Final

from flame_train.errors import ConfigError

Path = tuple[str, ...]

SCRIPT = ""
"""The key of the script's name in the tree."""

_SCRIPT = re.compile(r"[\w./\\-]*?(\w*train_network\.py)\b")
_CONTINUED = re.compile(r"[ \t]*[\\^`][ \t]*\r?\n")


def script_of(text: str) -> str:
    """The script of sd-scripts that a command line in `text` starts, or ""."""
    found = _SCRIPT.search(text)
    return found.group(1) if found else ""


def parse_command_line(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """The options of the command that `script_of` finds. Raises ConfigError for a quote that does not close.

    A switch is true, several values are a list; lines go on after \\, ^ or `, or where the next begins with a dash.
    """
    found = _SCRIPT.search(text)
    assert found is not None
    tree: dict[str, Any] = {SCRIPT: found.group(1)}
    lines: dict[Path, int] = {(SCRIPT,): text.count("\n", 0, found.start()) + 1}
    line = lines[SCRIPT,]
    option = ""
    for raw in text[found.end() :].split("\n"):
        words = _words(_CONTINUED.sub("", raw + "\n"), f"{name}:{line}")
        if line > lines[SCRIPT,] and words and not words[0].startswith("-") and not option:
            break  # another command
        for word in words:
            option = _take(tree, option, word)
            if word.startswith("--"):
                if len(tree) > _MOST:
                    raise ConfigError(f"{name}:{line}: expected a command of at most {_MOST} options, got more")
                lines[option,] = line
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
        tree[option] = value if equals else True
    elif option:
        _add(tree, option, word)
    return option


_MOST: Final = 2000  # options; the programs have some hundred


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
