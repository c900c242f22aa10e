"""Presets of `flame-train init`: what is trained, and on which card.

Each is data: a file below `presets/` has what holds for all families, a `family.toml` the rest, with its source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final, NamedTuple

from flame_train.config.suggest import did_you_mean
from flame_train.errors import ConfigError
from flame_train.families import FAMILY_TITLES, family_data

_FOLDER: Final = files("flame_train.tools").joinpath("presets")


class Preset(NamedTuple):
    """Values of keys, by path; the paths to fill in beside those that every config needs; and where they come from."""

    values: Mapping[str, Any]
    must: tuple[str, ...]
    notes: tuple[str, ...]


def names(family: str | None = None) -> list[str]:
    """The presets, a file each; those that a family has, where one is named."""
    found = sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml"))
    return [name for name in found if family is None or name in _of(family)]


def recipes() -> tuple[str, ...]:
    """The families that presets are for."""
    return tuple(family for family in FAMILY_TITLES if _of(family))


def cards(family: str) -> list[dict[str, Any]]:
    """The cards that something was measured for: their `gb`, the `keys` they need by path, and the `source`."""
    found: list[dict[str, Any]] = family_data(family).get("cards", [])
    return found


def _of(family: str) -> Mapping[str, Any]:
    """What a family has for each preset."""
    found: Mapping[str, Any] = family_data(family).get("presets", {})
    return found


def preset(family: str, name: str | None, card: float | None) -> Preset:
    """The values of a preset, and over them those of a card of so many GB. Raises ConfigError for an unknown preset.

    A card for which nothing was measured gets a budget, within which the plan chooses.
    """
    values: dict[str, Any] = {}
    must: tuple[str, ...] = ()
    notes: list[str] = []
    measured = cards(family)
    if name is not None:
        if name not in names():
            near = [known for known in names() if name and known.startswith(name[:2])]
            raise ConfigError(f"--preset: expected one of {', '.join(names())}, got {name}{did_you_mean(near)}")
        found = _read(name)
        own = _of(family).get(name)
        if own is None:
            known = ", ".join(sorted(other for other in FAMILY_TITLES if name in _of(other)))
            why = found.get("why", "for which no recipe was published yet")
            others = f"; it has {', '.join(names(family))}" if names(family) else ""
            raise ConfigError(f"--preset {name}: expected one of {known}, got {family}, {why}{others}")
        values |= found["keys"] | own["keys"]
        must = tuple(found["must"])
        notes.append(f"Preset {name}, for {found['title']}. Source: {own['source']}.")
        notes += [f"{found['note']}."] if "note" in found else []
        measured = [] if found.get("unmeasured") else measured
    if card is not None:
        fitting = [row for row in measured if row["gb"] <= card]
        if fitting:
            row = max(fitting, key=lambda row: int(row["gb"]))
            values |= row["keys"]
            notes.append(f"Card of {card:g} GB. Measured: {row['source']}.")
        else:
            values["memory.budget"] = f"{card:g} GB"
            notes.append(
                f"Card of {card:g} GB, for which no preset was measured: memory.budget makes the plan choose "
                f"what fits. {card:g} GB are {card * 1e9 / 2**30:.1f} GiB; the display has the rest of the card."
            )
            notes.append("`flame-train train FILE --dry-run --device cpu` shows the choice, also without a GPU.")
    return Preset(values, must, tuple(notes))


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(_FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
