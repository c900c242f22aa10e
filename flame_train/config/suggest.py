"""The nearest valid key for one that does not exist."""

from __future__ import annotations

import difflib

from flame_train.config.keys import keys, sections


def nearest(path: str) -> list[str]:
    """Up to three valid keys that `path` (`section.name` or a bare name) may have meant, best first.

    If another trainer uses that very name in the same section, its key is the answer. Else, in order: another
    trainer's key of that name in any section; near names in the same section; the same name elsewhere; the path with
    the nearest spelling.
    """
    section, _, name = path.rpartition(".")
    every = sorted(keys().values(), key=lambda key: key.section != section)
    home = {key.name: key.path for key in every if key.section == section}
    found = [key.path for key in every if name in key.aka]
    if found and section and keys()[found[0]].section == section:
        return found[:1]
    found += [home[match] for match in difflib.get_close_matches(name, home, n=3, cutoff=0.5)]
    found += [key.path for key in every if name == key.name]
    if not found:
        known = {key.name: key.path for key in keys().values()}
        known |= {other: key.path for key in keys().values() for other in key.aka}
        found = [known[match] for match in difflib.get_close_matches(name, known, n=2, cutoff=0.75)]
    if not found or section not in sections():
        found += difflib.get_close_matches(path, keys(), n=2, cutoff=0.7)
    return list(dict.fromkeys(found))[:3]


def nearest_section(name: str) -> list[str]:
    """Up to two sections spelled like `name`."""
    return difflib.get_close_matches(name, sections(), n=2, cutoff=0.5)


def did_you_mean(candidates: list[str]) -> str:
    """`; did you mean a or b?`, or "" without a candidate."""
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def or_where_to_look(candidates: list[str]) -> str:
    """As `did_you_mean`; where there is no candidate, what lists all keys."""
    return did_you_mean(candidates) or "; `flame-train init FAMILY` writes all there are"
