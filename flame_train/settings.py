"""Declares keys of a config, and tables of choices that add their own keys.

A `Table` lists the things of one kind that a config chooses among by name: optimizers, loss weightings, adapter kinds.
Each entry is one class in one file: its fields are its keys, its methods do the work. The schema, the loader,
`init` and the messages read the table, so a new entry needs no other file. A user's script adds entries by
`flame_train.register`; the sections that have the table then get their keys.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

S = TypeVar("S", bound="Section")
E = TypeVar("E", bound="Entry")


def field(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    multiple_of: int | None = None,
    free: bool = False,
    place: bool = False,
    aka: tuple[str, ...] = (),
    instead_of: str = "",
) -> Any:
    """Returns the pydantic field that declares a key of a config.

    Args:
        default: the value where the config says nothing.
        doc: its meaning in one line.
        unit: the unit of a number, such as "pixels".
        ge, gt, le, lt, multiple_of: bounds of a number, inclusive (ge, le) or exclusive (gt, lt).
        free: whether a run may be continued with another value: the trained weights do not depend on it.
        place: whether the value is a file or folder.
        aka: names of the same setting in other trainers, and its former names in this one.
        instead_of: the usual key, whose value holds where this one is 0; a misspelt key more likely meant that.
    """
    extra: dict[str, Any] = {"unit": unit, "free": free, "place": place, "aka": list(aka), "only": {}, "leads": False}
    extra["instead_of"] = instead_of
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt, "multiple_of": multiple_of}
    limits: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    return Field(default, description=doc, json_schema_extra=extra, **limits)


def one_or_several(value: Any) -> Any:
    """Takes a string or number where several are expected as the only one, and a list as a tuple; a validator."""
    if isinstance(value, str | int):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class Section(BaseModel):
    """A table of a config file. Unknown keys, NaN and infinity are refused; values are never coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Script:
    """The script that registered an entry: its name, and the file with the entry's class: name and SHA-256."""

    name: str
    file: str
    sha256: str


class Entry(Section):
    """A thing that a config chooses by its `name`; the fields are the keys that it adds to the config's section."""

    name: ClassVar[str]

    script: ClassVar[Script | None] = None
    """The script of a user that registered it; None: it came with the package."""

    aka: ClassVar[tuple[str, ...]] = ()
    """Names of it, or of its relatives that are not here, in other trainers; in lower case."""

    @classmethod
    def of(cls, section: Section) -> Self:
        """Returns the entry with the values that its keys have in a section."""
        return cls(**{name: getattr(section, name) for name in cls.model_fields})

    def problems(self, config: Any) -> Mapping[str, str]:
        """Returns problems of its keys that no bound can express, by key; `config` is the whole `Config`."""
        return {}


class Table(Mapping[str, type[E]], Generic[E]):
    """The things of one kind that a config chooses among with the key `key`.

    Args:
        key: the name of the key, such as "name" in `optimizer.name`. A table of one entry is no choice: it has no key.
        doc: the meaning of the key in one line.
        entries: the classes, in the order of messages; the default comes first all the same.
        default: the name of the entry that a config has where it chooses none.
        aka: names of the key in other trainers.
        free: whether a run may be continued with another choice; see `field`.
    """

    def __init__(
        self,
        key: str,
        doc: str,
        entries: Iterable[type[E]],
        default: str,
        aka: tuple[str, ...] = (),
        *,
        free: bool = False,
    ) -> None:
        self.key, self.doc, self.default, self.aka, self.free = key, doc, default, aka, free
        self._entries = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name != default)}
        self.sections: list[type[Section]] = []
        """The sections of a config that have this table's keys."""

    def __getitem__(self, name: str) -> type[E]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: type[E]) -> None:
        """Adds an entry, or takes it in the place of the one of that name. Sections get its keys."""
        self._entries[entry.name] = entry
        for section in self.sections:
            _take_keys(section)

    def of(self, section: Section) -> list[E]:
        """Returns the entries that `section` has: the chosen one, or of a table without a choice all."""
        return [self.chosen(section)]

    def chosen(self, section: Section) -> E:
        """Returns the entry that `section` chooses, with the values of its keys there."""
        return self[getattr(section, self.key, self.default)].of(section)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a section that has this table's choice, for `pydantic.create_model`."""
        fields: dict[str, Any] = {}
        if len(self) > 1:
            key = field(self.default, self.doc, aka=self.aka, free=self.free)
            key.json_schema_extra["leads"] = True
            key.json_schema_extra["known"] = {other: entry.name for entry in self.values() for other in entry.aka}
            fields[self.key] = (Literal[tuple(self)], key)
        for name in dict.fromkeys(name for entry in self.values() for name in entry.model_fields):
            fields[name] = self._shared(name)
        return fields

    def _shared(self, name: str) -> tuple[Any, FieldInfo]:
        """Returns a key that one or several entries have. Where their defaults differ, the chosen entry's holds."""
        owners = {entry.name: entry.model_fields[name] for entry in self.values() if name in entry.model_fields}
        first = next(iter(owners.values()))
        assert isinstance(first.json_schema_extra, dict)
        only: dict[str, Any] = {self.key: list(owners)} if len(owners) < len(self) else {}
        extra = {**first.json_schema_extra, "only": only, "default": first.default}
        defaults = {owner: info.default for owner, info in owners.items()}
        extra |= {"defaults": defaults, "chosen_by": self.key}

        def default(data: dict[str, Any]) -> Any:
            return defaults.get(data.get(self.key, self.default), first.default)

        info: FieldInfo = Field(default_factory=default, description=first.description, json_schema_extra=extra)
        return Annotated[first.annotation, "shared", *first.metadata], info


class AllOf(Table[E]):
    """The things of one kind that a config always has, each with its keys: none is chosen."""

    def __init__(self, entries: Iterable[type[E]]) -> None:
        super().__init__("", "", entries, "")

    def of(self, section: Section) -> list[E]:
        return [entry.of(section) for entry in self.values()]

    def fields(self) -> dict[str, Any]:
        return {name: (info.annotation, info) for entry in self.values() for name, info in entry.model_fields.items()}


def entries_in(package: str, kind: type[E]) -> list[type[E]]:
    """Returns every subclass of `kind` with a `name` below `package`, so that an entry needs its file only."""
    prefix = f"{package}."
    for module in sorted(pkgutil.walk_packages(sys.modules[package].__path__, prefix), key=lambda module: module.name):
        importlib.import_module(module.name)
    entries = [entry for entry in _below(kind) if entry.__module__.startswith(f"{package}.")]
    for entry in entries:
        if lacking := sorted(getattr(entry, "__abstractmethods__", ())):
            raise TypeError(f"{entry.__module__}.{entry.__name__} lacks {', '.join(lacking)} of {kind.__name__}")
    return entries


def _below(kind: type[E]) -> Iterator[type[E]]:
    for entry in kind.__subclasses__():
        if "name" in vars(entry):
            yield entry
        yield from _below(entry)


def choices(*tables: Table[Any]) -> Callable[[type[S]], type[S]]:
    """Returns a class decorator: the section gets the key of each table, and the keys of all its entries."""

    def add(section: type[S]) -> type[S]:
        whole = _with_keys(section, section, tables)
        whole.tables = tables  # type: ignore[attr-defined]
        for table in tables:
            table.sections.append(whole)
        return whole

    return add


def _with_keys(section: type[S], like: type[Section], tables: Iterable[Table[Any]]) -> type[S]:
    """Returns a subclass of a section that has the keys of tables too; its name and words are those of `like`."""
    fields = {name: declared for table in tables for name, declared in table.fields().items()}
    whole: type[S] = create_model(like.__name__, __base__=section, __module__=like.__module__, **fields)
    whole.__doc__ = like.__doc__
    return whole


def _take_keys(section: type[Section]) -> None:
    """Gives a section that `choices` made the keys that its tables have now."""
    base = section.__base__
    assert base is not None
    tables: tuple[Table[Any], ...] = section.tables  # type: ignore[attr-defined]
    fresh: type[BaseModel] = _with_keys(base, section, tables)
    section.model_fields.clear()
    section.model_fields.update(fresh.model_fields)
    section.model_rebuild(force=True)


def reserved_key(name: str, kind: type, info: Any) -> Callable[[type[S]], type[S]]:
    """Returns a class decorator: the section gets the key `name`, a word that Python keeps for itself."""

    def add(section: type[S]) -> type[S]:
        fields: dict[str, Any] = {name: (kind, info)}
        whole: type[S] = create_model(section.__name__, __base__=section, __module__=section.__module__, **fields)
        whole.__doc__ = section.__doc__
        return whole

    return add


def entries_of(section: Section) -> list[Entry]:
    """Returns the entries that a section chooses or always has, each with the values of its keys."""
    tables: tuple[Table[Any], ...] = getattr(section, "tables", ())
    return [entry for table in tables for entry in table.of(section)]
