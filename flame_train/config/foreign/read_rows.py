"""Tables of other trainers' settings: a TOML file for each trainer, of whose lines rows are made.

A line is `"its name@file:line" = ...`, where file and line are the place in the program's source. To the right stands
our key alone, if the value is carried over unless it is off, or a table of these:

- `to`: our key, or keys.
- `as`: the conversion of the value, one of `_SHARED`.
- `is`: our value, of a switch.
- `choices`: our value by the value there, or "" where we do the same; `otherwise` is the reason for all others.
- `beside`: the other setting without which the value means nothing.
- `belongs_to`: the switch beside which the setting is lost, since it means nothing alone.
- `never`: why it has no counterpart. Nothing is lost where it is off, or has the value `usual`.
- `always`: what flame-train always does.
- `needless`: why no value of it changes what a run makes.
- `read`: whether the conversion of another setting reads it.
- `of`, `not_of`: the models, as the trainer calls them, for which the line holds or does not.
- `absent`, `say`: as a `Row` has them.

Any other conversion stands in the trainer's module, under the setting's name or the one that `by` has. Several names
in a line, or under `names`, share it. A name in parentheses stands for what follows from other settings.
`optimizer_keys` stands for the settings of all optimizers, which have the names of the papers, below a prefix.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flame_train.families import named_by

from . import conversions as c
from . import distilled
from .table import NOTHING, Convert, Lost, Row, Source, Table, is_off, keep

_SHARED: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "same": keep,
        "given": c.unless_off,
        "number": c.to_number,
        "float": c.to_float,
        "number format": c.number_format,
        "checkpoint": c.checkpoint,
        "hub file": c.hub_file,
        "training adapter": distilled.training_adapter,
        "optimizer": c.optimizer,
        "sampler": c.sampler,
        "side": c.side,
        "ending": c.ending,
        "inverted": c.inverted,
        "min-SNR": c.min_snr,
        "seed": c.seed,
        "mask folder": c.mask_folder,
    }
)


def read_table(
    file: str,
    trainer: str,
    own: Mapping[str, Convert] = MappingProxyType({}),
    of_sets: Mapping[str, Convert] | None = None,
) -> Table:
    """Returns the rows in a file beside this one.

    Args:
        file: its name, without the ending.
        trainer: the name that families' `family.toml` has for the trainer.
        own: conversions by the setting's name, or the name that a line has in `by`.
        of_sets: those of a set of images that are others there.
    """
    tree = tomllib.loads((Path(__file__).parent / f"{file}.toml").read_text(encoding="utf-8"))
    models = named_by(trainer) | named_by(f"{trainer} types")
    return Table(
        *(
            tuple(_rows(tree.get(part, ()), models, each))
            for part, each in (("rows", own), ("set_rows", {**own, **(of_sets or {})}))
        )
    )


def _rows(groups: Iterable[Mapping[str, Any]], models: Mapping[str, str], own: Mapping[str, Convert]) -> Iterator[Row]:
    for group in groups:
        if "optimizer_keys" in group:
            yield from optimizer_rows(**group)
            continue
        lines = {group["names"]: group} if "names" in group else group
        for names, line in lines.items():
            line = {"to": line, "as": "given"} if isinstance(line, str) else line
            several = [names] if names.startswith("(") else names.split()
            yield from (_row(name, line, models, own) for name in several)


def _row(named: str, line: Mapping[str, Any], models: Mapping[str, str], own: Mapping[str, Convert]) -> Row:
    name, _, at = named.partition("@")
    to = line.get("to", ())
    convert, say = _answer(named, line, own)
    families = {models[model] for model in _list(line.get("of", ()))}
    if "not_of" in line:
        families = {*models.values()} - {models[model] for model in _list(line["not_of"])}
    return Row(
        name,
        _list(to),
        convert,
        line.get("absent"),
        tuple(families),
        line.get("say", say),
        at,
        line.get("needless", ""),
        line.get("read", False),
    )


def _list(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _answer(named: str, line: Mapping[str, Any], own: Mapping[str, Convert]) -> tuple[Convert, str]:
    """Returns the conversion of a line, and what is said to somebody who writes its name into our config."""
    if "never" in line:
        return _never(line["never"], line.get("usual")), f"not here: {line['never']}"
    if "always" in line:
        return _always(line["always"]), f"always on: {line['always']}; remove it"
    if "needless" in line:
        return _nothing, f"not needed: {line['needless']}; remove it"
    if "read" in line:
        return _nothing, ""
    if "is" in line:
        return c.switched(line["is"]), ""
    if "choices" in line:
        choices = {name or None: ours or NOTHING for name, ours in line["choices"].items()}
        return c.one_of(choices | ({"": NOTHING} if None in choices else {}), line["otherwise"]), ""
    if "beside" in line:
        return _beside(line["beside"]), ""
    if "belongs_to" in line:
        return c.only_with(line["belongs_to"]), ""
    if "as" in line:
        return _SHARED[line["as"]], ""
    return own[line.get("by", named.partition("@")[0])], ""


def _nothing(value: Any, source: Source) -> Any:
    return NOTHING


def _beside(other: str) -> Convert:
    def convert(value: Any, source: Source) -> Any:
        return value if source.get(other) else NOTHING

    return convert


def _always(what: str) -> Convert:
    def convert(value: Any, source: Source) -> Any:
        return NOTHING if value and value not in ("false", "False") else Lost(f"always on: {what}")

    return convert


def _never(why: str, usual: Any) -> Convert:
    def convert(value: Any, source: Source) -> Any:
        return NOTHING if (is_off(value) if usual is None else c.number(value) in (usual, None)) else Lost(why)

    return convert


def optimizer_rows(optimizer_keys: str, at: str = "", without: str = "") -> Iterator[Row]:
    from flame_train.config.keys import keys

    for key in keys().values():
        left_out = key.name == "name" or (without and key.name.startswith(without))
        if key.section == "optimizer" and key.from_table and not left_out:
            yield Row(f"{optimizer_keys}{key.name}", (f"optimizer.{key.name}",), c.own_key, at=at)
    yield Row(f"{optimizer_keys}*", (), _never("no key of an optimizer here has this name", None), at=at)
