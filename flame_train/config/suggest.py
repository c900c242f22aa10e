"""The answer to a key that does not exist: the key that was meant, or a sentence about another trainer's setting."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from flame_train.config.foreign.hints import sentence
from flame_train.config.keys import keys, sections

_PAGE = "docs/conventions.md says where settings of other trainers went"
_NOWHERE = f"; `flame-train init FAMILY` writes all there are, {_PAGE}"


def answer(path: str, lacking: Collection[str] = (), otherwise: str = _NOWHERE) -> str:
    """Says what a message about the unknown key `path` ends with.

    A setting of another trainer in another unit, with the opposite sense, that is always on or that is not here, gets
    a sentence. Else the keys that may have been meant are named, but none of `lacking`, those that the model's family
    does not have. Where there is neither, `otherwise`.
    """
    words = sentence(path)
    if words:
        return f"; {words}. {_PAGE}"
    return did_you_mean([key for key in nearest(path) if key not in lacking]) or otherwise


def nearest(path: str) -> list[str]:
    """Up to three valid keys that `path` (`section.name` or a bare name) may have meant, best first.

    If another trainer calls a key of this section by the very name, the answer is that key. Else it is:
    1. keys of this section that are spelled like it,
    2. keys of other sections that another trainer calls by the very name; without any, keys of that name,
    3. without any of these, keys that have a similar name here or in another trainer.
    """
    section, _, name = path.rpartition(".")
    every = sorted(keys().values(), key=lambda key: key.section != section)
    elsewhere = [key.path for key in every if name in key.aka]
    if at_home := [path for path in elsewhere if keys()[path].section == section]:
        return at_home[:2]
    paths = [key.path for key in every if key.section == section and _is_typo(name, key.name)]
    if elsewhere:
        return [*paths, *elsewhere][:2]
    paths += [key.path for key in every if name == key.name]
    if not paths:
        paths = [
            key.path for key in every if any(_is_typo(name, other) for other in (key.name, *key.aka) if len(other) > 2)
        ]
    paths = [path for path in paths if keys()[path].instead_of not in paths]
    return list(dict.fromkeys(paths))[:3]


def nearest_section(name: str) -> list[str]:
    """Up to two sections spelled like `name`."""
    return difflib.get_close_matches(name, sections(), n=2, cutoff=0.75)


def did_you_mean(candidates: list[str]) -> str:
    """`; did you mean a or b?`, or "" without a candidate."""
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _is_typo(written: str, meant: str) -> bool:
    """Says whether one was written for the other by a slip: one edit away, or nearly the same letters."""
    if abs(len(written) - len(meant)) > max(1, len(meant) // 4):
        return False
    return _one_edit(written, meant) or difflib.SequenceMatcher(None, written, meant).ratio() >= 0.85


def _one_edit(a: str, b: str) -> bool:
    """Says whether a letter left out, put in, replaced, or exchanged with its neighbour makes `b` of `a`."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rests, right = a[start:], b[start:]
    if rests[1:] == right[1:] or rests[1:] == right or rests == right[1:]:
        return True
    return rests[:2] == right[:2][::-1] and rests[2:] == right[2:]
