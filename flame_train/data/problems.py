"""Problems of many images, as few lines: those of one cause together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Final

_APART: Final = 3  # images that have a line each, if no more have the cause
_NAMED: Final = 3
_OWN_SIZE: Final = re.compile(r"^\d+x\d+ pixels ")
_VERBS: Final = {"has ": " have ", "is ": " are ", "lacks ": " lack "}


def grouped(problems: Sequence[str], most: int = 100) -> list[str]:
    """Returns one line a cause, in the order in which the causes come first.

    A problem is "FILE: what is wrong: what to do".

    More than three images of one cause are counted, and three of them named; NAME stands for the name of each. Of more
    than `most` lines the others are counted.
    """
    causes: dict[str, list[str]] = {}
    for problem in problems:
        file, _, words = problem.partition(": ")
        cause = _OWN_SIZE.sub("", words).replace(f"{PurePosixPath(file).stem}.", "NAME.")
        causes.setdefault(cause or problem, []).append(problem)
    lines = [line for cause, own in causes.items() for line in (own if len(own) <= _APART else [_together(cause, own)])]
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most} more"]


def _together(cause: str, problems: Iterable[str]) -> str:
    names = [problem.partition(": ")[0] for problem in problems]
    verb = next((verb for verb in _VERBS if cause.startswith(verb)), "")
    words = _VERBS.get(verb, ": ") + re.sub(r"\bit\b", "them", cause.removeprefix(verb))
    return f"{len(names):,} images, such as {', '.join(names[:_NAMED])}{',' if verb else ''}{words}"
