"""Names that a config chooses by presets and globs; a pattern without a match is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from flame_train.errors import ConfigError


def choose(
    names: Sequence[str], patterns: Sequence[str], presets: Mapping[str, Sequence[str]], wrong: str, advice: str
) -> list[str]:
    """Returns the names that presets and globs choose, each once, in the order of `names`.

    Args:
        patterns: names of presets, or globs in which `*` also matches dots.
        wrong: first line of the error message.
        advice: last line of the error message.

    Raises:
        ConfigError: a pattern matches no name; the message lists each with the nearest names.
    """
    chosen: set[str] = set()
    idle = []
    for pattern in dict.fromkeys(patterns):
        matches = [name for name in names if any(fnmatchcase(name, g) for g in presets.get(pattern, (pattern,)))]
        chosen.update(matches)
        idle += [] if matches else [pattern]
    if idle:
        raise ConfigError("\n".join([wrong, *(f"  {p!r}{_hint(p, names, presets)}" for p in idle), advice]))
    return [name for name in names if name in chosen]


def _hint(pattern: str, names: Iterable[str], presets: Mapping[str, Sequence[str]]) -> str:
    """Returns a suggestion: a preset, a whole name, or a glob over the beginning or end of names."""
    endings = {"*." + ".".join(name.split(".")[-n:]) for name in names for n in (1, 2, 3)}
    beginnings = {name.partition(".")[0] + ".*" for name in names}
    begin, _, end = pattern.rpartition("*")
    inside = get_close_matches(f"*{end}", sorted(endings), n=3) if begin and end else []
    near = inside or get_close_matches(pattern, [*presets, *sorted(beginnings | endings), *names], n=3)
    return f"; near it: {', '.join(near)}" if near else ""
