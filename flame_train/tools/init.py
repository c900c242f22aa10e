"""`flame-train init`: a commented config that a person edits.

Presets say what is trained, and on which card. Each is data: a file below `presets/` has what holds for all families, a
`family.toml` the rest, with its source.
"""

from __future__ import annotations

import difflib
import textwrap
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

from flame_train.config.load import from_options
from flame_train.config.render import commented, short
from flame_train.config.schema import Config
from flame_train.config.suggest import did_you_mean
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import refuse_place
from flame_train.errors import ConfigError
from flame_train.families import FAMILY_TITLES, family_data, licences, published_terms, training_adapters, usual_keys

MUST: Final = ("model.checkpoint", "data.path", "output.dir")


def template(family: str, name: str | None = None, card: float | None = None, full: bool = False) -> str:
    """Returns the commented config of `family`, a TOML text.

    Args:
        name: a preset, for what is trained.
        card: GB of the card that it is to fit.
        full: whether every key is in it, as without preset and card.

    Raises:
        ConfigError: there is no such family or preset.
    """
    from flame_train.models.registry import FAMILIES

    if family not in FAMILIES:
        near = difflib.get_close_matches(family.removesuffix("-lora"), FAMILIES, n=1)
        raise ConfigError(f"expected a model family ({', '.join(FAMILIES)}), got {family}{did_you_mean(near)}")
    title = f"A LoRA for {FAMILIES[family].title}: flame-train train FILE"
    if licences(family):
        title += "".join(f"\n# {line}" for line in textwrap.wrap(f"Licences of {published_terms(family)}", 110))
    if name is None and card is None:
        return commented(_config(usual_keys(family)), title, FAMILIES[family].unsupported_keys())
    chosen = preset(family, name, card)
    if not full:
        more = "Every other key has its default; `flame-train init FAMILY --full` writes them all."
        return short(chosen.values, title, (*MUST, *chosen.must), (*chosen.notes, more))
    text = commented(_config(chosen.values), title, FAMILIES[family].unsupported_keys())
    return "".join(f"# {note}\n" for note in chosen.notes) + text


def _config(values: Mapping[str, Any]) -> Config:
    """Returns the config with these values, by path."""
    sections: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = value
    return from_options(**sections)


def write_template(
    family: str, path: Path, force: bool = False, name: str | None = None, card: float | None = None, full: bool = False
) -> None:
    """Write the commented config of `family`.

    Args:
        family, name, card, full: as in `template`.

    Raises:
        ConfigError: as `template` does, and for a path without .toml.
        OutputError: the file cannot be written, or exists without `force`.
    """
    raw = template(family, name, card, full).encode()
    refuse_place(path, ".toml", force)
    write_atomically(path, [raw], len(raw))


_FOLDER: Final = files("flame_train.tools").joinpath("presets")


class Preset(NamedTuple):
    """Values of keys, by path; the paths to fill in beside those that every config needs; and where they come from.

    `sources` says that of each value.
    """

    values: Mapping[str, Any]
    must: tuple[str, ...]
    notes: tuple[str, ...]
    sources: Mapping[str, str]


def names(family: str | None = None) -> list[str]:
    """Returns the presets, a file each; those that a family has, where one is named."""
    presets = sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml"))
    return [name for name in presets if family is None or name in _of(family)]


def recipes() -> tuple[str, ...]:
    """Returns the families that presets are for."""
    return tuple(family for family in FAMILY_TITLES if _of(family))


def cards(family: str) -> list[dict[str, Any]]:
    """Returns the cards that something was measured for: their `gb`, the `keys` they need by path, and the `source`."""
    rows: list[dict[str, Any]] = family_data(family).get("cards", [])
    return rows


def _of(family: str) -> Mapping[str, Any]:
    presets: Mapping[str, Any] = family_data(family).get("presets", {})
    return presets


def preset(family: str, name: str | None, card: float | None) -> Preset:
    """Returns the values of a preset, and over them those of a card of so many GB. Raises ConfigError for an unknown
    preset.

    A card for which nothing was measured gets a budget, within which the plan chooses.
    """
    values: dict[str, Any] = dict(usual_keys(family))
    must: tuple[str, ...] = ()
    notes: list[str] = []
    sources: dict[str, str] = {}
    measured = cards(family)
    if name is not None:
        if name not in names():
            near = [known for known in names() if name and known.startswith(name[:2])]
            raise ConfigError(f"--preset: expected one of {', '.join(names())}, got {name}{did_you_mean(near)}")
        common = _read(name)
        of_family = _of(family).get(name)
        if of_family is None:
            known = ", ".join(sorted(other for other in FAMILY_TITLES if name in _of(other)))
            why = common.get("why", "for which no recipe was published yet")
            others = f"; it has {', '.join(names(family))}" if names(family) else ""
            raise ConfigError(f"--preset {name}: expected one of {known}, got {family}, {why}{others}")
        values |= common["keys"] | of_family["keys"]
        sources |= dict.fromkeys(values, f"preset {name}: {of_family['source']}")
        must = tuple(common["must"])
        notes.append(f"Preset {name}, for {common['title']}. Source: {of_family['source']}.")
        notes += [f"{common['note']}."] if "note" in common else []
        notes += [
            f'To train on {each["of"]}: model.training_adapter = "{each["file"]}", by {each["by"]}.'
            for each in training_adapters(family)
        ]
        measured = [] if common.get("unmeasured") else measured
    if card is not None:
        fitting = [row for row in measured if row["gb"] <= card]
        if fitting:
            row = max(fitting, key=lambda row: int(row["gb"]))
            values |= row["keys"]
            sources |= dict.fromkeys(row["keys"], f"a card of {row['gb']} GB, measured: {row['source']}")
            notes.append(f"Card of {card:g} GB. Measured: {row['source']}.")
        else:
            values["memory.budget"] = f"{card:g} GB"
            sources["memory.budget"] = f"the card of {card:g} GB, for which nothing was measured"
            notes.append(
                f"Card of {card:g} GB, for which no preset was measured: memory.budget makes the plan choose "
                f"what fits. {card:g} GB are {card * 1e9 / 2**30:.1f} GiB; the display has the rest of the card."
            )
            notes.append("`flame-train train FILE --dry-run --device cpu` shows the choice, also without a GPU.")
    return Preset(values, must, tuple(notes), sources)


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(_FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
