"""Applies a program's table to one of its configs: values for our keys, and what has none, each with its line."""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Union, get_args, get_origin

from flame_train.config.command_line import Unset
from flame_train.config.foreign.conversions import number
from flame_train.config.foreign.table import NO_CONTROL, Changed, Lost, Nothing, Program, Row, Setting, Source
from flame_train.config.keys import Key, keys
from flame_train.config.load import problems_in

SETS: Final = "data.sets"
_SET: Final = "set."
_SECRET: Final = re.compile(r"(^|[_.])(token|api_key|password|secret)$")
"""Names of settings whose values are shown nowhere."""
_CAPTIONS: Final = "captions"
_DECISIVE: Final = frozenset(
    (
        *("model.checkpoint", "optimizer.name", "optimizer.lr", "lora.kind", "train.steps", "train.epochs"),
        *("data.resolution", "data.resolutions", "set.resolution", "set.resolutions"),
    )
)
"""Keys whose loss makes another recipe of the rest: another model, or a rate of Prodigy with AdamW, for two."""
_AS_HERE: Final = "flame-train does the same without a key"
_UNSET: Final = "a variable of the shell that this script does not set; write its value"
_OF_ANOTHER: Final = "it belongs to a choice that this config does not make"


@dataclass(frozen=True, slots=True)
class Carried:
    """A value for a key of ours, where it comes from in words, and the settings there that it was made of."""

    value: Any
    origin: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """A setting that has no counterpart, with its place, why, and what it would have decided."""

    place: str
    setting: str
    reason: str
    keys: Collection[str] = ()

    def __str__(self) -> str:
        return f"{self.place}: {self.setting}: {self.reason}" if self.place else f"{self.setting}: {self.reason}"


@dataclass(slots=True)
class Conversion:
    """What a config of another program says in ours.

    Attributes:
        program: the other trainer's name.
        values: our keys by path.
        sets: the tables of `[[data.sets]]`; empty where one folder stands in `[data]`.
        dropped: what has no counterpart.
        notes: files that it names and that are not there.
        needless: the settings that need no key here, each with the reason.
        missing: what is still to be set.
    """

    program: str
    values: dict[str, Carried] = field(default_factory=dict)
    sets: list[dict[str, Carried]] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    needless: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def decisive(self) -> list[Dropped]:
        """Those of `dropped` whose key has no value now, and whose default would make another recipe of the rest."""
        return [each for each in self.dropped if any(key in _DECISIVE and key not in self.values for key in each.keys)]

    def lost(self) -> list[str]:
        """Says what is not there any more, in words: first what decides what is trained."""
        first = self.decisive()
        return [*map(str, first), *self.notes, *(str(each) for each in self.dropped if each not in first)]

    def tree(self) -> dict[str, dict[str, Any]]:
        """Returns the values as sections."""
        tree: dict[str, dict[str, Any]] = {}
        for path, carried in self.values.items():
            section, name = path.split(".")
            tree.setdefault(section, {})[name] = carried.value
        if self.sets:
            tree.setdefault("data", {})["sets"] = [
                {name: each.value for name, each in one.items()} for one in self.sets
            ]
        return tree


def convert(program: Program, source: Source, lacking: Collection[str] = ()) -> Conversion:
    """Returns what `source`, a config of `program`, says in our keys; `lacking` ones mean nothing to its family."""
    conversion = Conversion(program.name, notes=list(source.notes), needless=dict(source.idle))
    table, used = program.table(), set[str]()
    if source.settings:  # a file of sets alone says nothing about training
        used |= _Work(program, source, conversion).apply(table.rows, source.settings, conversion.values)
    sets = []
    for one in source.sets:
        own: dict[str, Carried] = {}
        work = _Work(program, replace(source, settings={**source.settings, **one}), conversion)
        used |= work.apply(table.set_rows, one, own)
        sets.append(own)
    for rows, settings in ((table.rows, source.settings), *((table.set_rows, one) for one in source.sets)):
        for name in settings:
            if name not in used and any(row.read and row.holds(name, source.family) for row in rows):
                conversion.needless.setdefault(_called(settings, name), _OF_ANOTHER)
    for name in used:  # what is carried over, or another setting's value is made of, is needed
        conversion.needless.pop(_called(source.settings, name), None)
    _place_sets(sets, conversion)
    conversion.dropped[:] = dict.fromkeys(conversion.dropped)  # what several folders lack is told once
    for path in [path for path in conversion.values if path in lacking]:
        _drop(conversion, path, f"means nothing for {source.family}")
    _validate(conversion)
    return conversion


@dataclass(frozen=True, slots=True)
class _Work:
    """One conversion under way."""

    program: Program
    source: Source
    found: Conversion

    def apply(self, rows: Iterable[Row], settings: Mapping[str, Setting], values: dict[str, Carried]) -> set[str]:
        """Lays the answers of `rows` about `settings` into `values`, the rest into `found`; returns what they read."""
        seen: set[str] = set()
        used: set[str] = set()
        for row in rows:
            names = [name for name in settings if name not in seen and row.holds(name, self.source.family)]
            for name in names:
                seen.add(name)
                if not row.read:
                    used |= self._answer(row, settings[name], name, values)
            if not names and row.absent is not None and (not row.families or self.source.family in row.families):
                used |= self._answer(row, Setting(row.absent, ""), f"{self.program.name}'s default", values)
        for name, setting in settings.items():
            if name not in seen:
                shown = _shown(name, setting)
                self.found.dropped.append(Dropped(setting.place, shown, "not known to this version"))
        return used

    def _called(self, name: str) -> str:
        return _called(self.source.settings, name)

    def _answer(self, row: Row, setting: Setting, name: str, values: dict[str, Carried]) -> set[str]:
        """Lays the answer of one row; a default of the other program has no place. Returns the settings it used."""
        shown = _shown(name, setting) if setting.place else setting.written or f"{row.key} ({name})"
        self.source.asked.clear()
        words = setting.value if isinstance(setting.value, list) else [setting.value]
        unset = row.to and any(isinstance(one, Unset) for one in words)
        try:
            answer = Lost(_UNSET) if unset else row.convert(setting.value, self.source)
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError):
            answer = Lost("this value has no meaning here")
        remark = ""
        if isinstance(answer, Changed):
            for reason in answer.lost:
                self.found.dropped.append(Dropped(setting.place, name, reason))
            answer, remark = answer.value, f"; {answer.remark}" if answer.remark else ""
        if isinstance(answer, Nothing):
            if setting.place:
                beside = sorted(map(self._called, self.source.asked - {name}))
                told = f"beside {', '.join(beside)}, {_AS_HERE}" if beside else _AS_HERE
                self.found.needless.setdefault(self._called(name), row.inert or told)
            return set()
        if isinstance(answer, Lost):
            self.found.dropped.append(Dropped(setting.place, shown, answer.reason, row.to))
        else:
            by_path = answer if isinstance(answer, Mapping) else {row.to[0]: answer}
            sources = sorted(set(map(self._called, self.source.asked))) if row.key.startswith("(") else []
            origin = f"{', '.join(sources) or setting.written or (name if setting.place else shown)}{remark}"
            settings = (*((name,) if setting.place else ()), *sorted(self.source.asked - {name}))
            settings = tuple(dict.fromkeys(map(self._called, settings)))
            for path, value in by_path.items():
                assert path in row.to, f"{row.key} gives {path}, which its row does not name"
                if path == "set.control" and not self.source.may_have_controls:
                    self.found.dropped.append(Dropped(setting.place, shown, NO_CONTROL))
                    continue
                _lay(path, Carried(value, origin, settings), Dropped(setting.place, shown, ""), values, self.found)
        return {*self.source.asked, row.key, setting.written.partition(" ")[0]}


def _called(settings: Mapping[str, Setting], name: str) -> str:
    return settings[name].written.partition(" = ")[0] or name if name in settings else name


def _lay(path: str, carried: Carried, dropped: Dropped, values: dict[str, Carried], found: Conversion) -> None:
    """Puts a value at its key, if this version has it and no setting with precedence took it."""
    known = keys()
    if not path.startswith(_SET):
        if path not in known:
            found.dropped.append(Dropped(dropped.place, dropped.setting, f"this version has no {path}"))
            return
        carried = Carried(fitting(carried.value, known[path]), carried.origin, carried.settings)
    if path not in values:
        values[path] = carried
    elif values[path].value != carried.value and dropped.place:
        reason = f"{path} comes from {values[path].origin}"
        found.dropped.append(Dropped(dropped.place, dropped.setting, reason))


def set_keys() -> Mapping[str, Any]:
    """Returns the keys of a table of `[[data.sets]]`; none where this version has no such tables."""
    return get_args(keys()[SETS].annotation)[0].model_fields if SETS in keys() else {}


def _place_sets(sets: list[dict[str, Carried]], found: Conversion) -> None:
    """Places one folder in `[data]`, several in `[[data.sets]]`, with what they share in `[data]` alone."""
    plain = [{path.removeprefix(_SET): carried for path, carried in one.items()} for one in sets]
    own = set_keys()
    if "resolutions" not in own:
        for one in plain:
            _one_resolution(one, found)
    several = len(plain) > 1 or any(_of_sets_alone(name, own) for one in plain for name in one)
    if not several or not own:
        for name, carried in (plain[0] if plain else {}).items():
            _to_data(name, carried, found)
        for one in plain[1:]:
            path = one.get("path", Carried("?", ""))
            found.dropped.append(Dropped("", f"the folder {path.value}", "one folder a run in this version"))
        return
    _own_resolutions(plain, own)
    for name in dict.fromkeys(name for one in plain for name in one if not _is_own(name, own)):
        values = [one[name] for one in plain if name in one]
        if all(each.value == values[0].value for each in values):
            _to_data(name, values[0], found)
        else:
            found.dropped.append(Dropped("", name, "differs between folders, and is one for all here"))
    for name in [name for name in plain[0] if name != "path" and _is_shared(name, plain)]:
        _to_data(name, plain[0][name], found)
        for one in plain:
            del one[name]
    found.sets += [_table(one, own) for one in plain]


def _is_shared(name: str, sets: Sequence[Mapping[str, Carried]]) -> bool:
    """Says whether all sets have the same value of a key that `[data]` or `[captions]` has too."""
    path = name if name.startswith(f"{_CAPTIONS}.") else f"data.{name}"
    return path in keys() and all(name in one and one[name].value == sets[0][name].value for one in sets)


def _own_resolutions(sets: list[dict[str, Carried]], own: Mapping[str, Any]) -> None:
    """Gives each set a list of its own where the resolution differs between sets."""
    resolutions = {one["resolution"].value for one in sets if "resolution" in one}
    if len(resolutions) > 1 and "resolutions" in own:
        for one in sets:
            if (single := one.pop("resolution", None)) is not None:
                one["resolutions"] = Carried([single.value], single.origin, single.settings)


def _is_own(name: str, own: Mapping[str, Any]) -> bool:
    """Says whether a table of `[[data.sets]]` has the key, or, of captions, the table of them."""
    return name.partition(".")[0] in own


def _of_sets_alone(name: str, own: Mapping[str, Any]) -> bool:
    """Says whether only a table of `[[data.sets]]` has the key."""
    return _is_own(name, own) and name.partition(".")[0] != _CAPTIONS and f"data.{name}" not in keys()


def _table(one: Mapping[str, Carried], own: Mapping[str, Any]) -> dict[str, Carried]:
    table: dict[str, Carried] = {}
    captions: dict[str, Any] = {}
    for name, carried in one.items():
        if name.startswith(f"{_CAPTIONS}.") and _CAPTIONS in own:
            captions[name.partition(".")[2]] = carried.value
        elif name in own:
            table[name] = Carried(_fit(carried.value, own[name].annotation), carried.origin, carried.settings)
    if captions:
        table[_CAPTIONS] = Carried(captions, "of its captions")
    return table


def _one_resolution(one: dict[str, Carried], found: Conversion) -> None:
    """Takes the largest of several resolutions where a set has one."""
    several = one.pop("resolutions", None)
    if several is not None:
        one["resolution"] = Carried(max(several.value), several.origin, several.settings)
        found.dropped.append(
            Dropped("", f"resolutions {several.value}", "one resolution in this version; the largest stands")
        )


def _to_data(name: str, carried: Carried, found: Conversion) -> None:
    path = name if name.startswith(f"{_CAPTIONS}.") else f"data.{name}"
    dropped = Dropped("", f"{name} of a folder ({carried.origin})", "")
    if carried.settings:
        found.values.pop(path, None)  # what a folder says of itself wins over what holds for all
    _lay(path, carried, dropped, found.values, found)


def fitting(value: Any, key: Key) -> Any:
    """Returns `value` as the type of `key` where nothing is lost by it: 4.0 as 4, "1e-4" as 0.0001, text in a list."""
    if key.is_list and not key.is_tables and isinstance(value, str) and value not in key.choices:
        return [value]
    return _fit(value, key.annotation)


def _fit(value: Any, annotation: Any) -> Any:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if isinstance(value, bool) or value is None:
        return value
    if int in kinds or float in kinds:
        value = number(value)
    if float in kinds and isinstance(value, int):
        return float(value)
    if int in kinds and isinstance(value, float) and value == int(value):
        return int(value)
    if str in kinds and isinstance(value, int | float):
        return str(value)
    return value


def _validate(found: Conversion) -> None:
    """Takes out what the schema refuses, with its reason; what it misses is still to be set."""
    for _ in range(len(found.values) + 1):
        wrong = list(_refused(found))
        if not wrong:
            break
        for path, reason in wrong:
            _drop(found, path, reason)
    found.missing = [f"{problem.key}: {problem.message}" for problem in problems_in(found.tree())]


def _refused(found: Conversion) -> Iterator[tuple[str, str]]:
    for problem in problems_in(found.tree()):
        if problem.key in found.values:
            yield problem.key, problem.message


def _drop(found: Conversion, path: str, reason: str) -> None:
    carried = found.values.pop(path)
    found.dropped.append(Dropped("", f"{path} = {carried.value!r} (from {carried.origin})", reason, (path,)))


def _shown(name: str, setting: Setting) -> str:
    if _SECRET.search(name):
        return f"{name} (its value is not repeated)"
    if setting.written:
        return setting.written
    value = setting.value
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return f"{name} = {text if len(text) <= 60 else text[:57] + '...'}"
