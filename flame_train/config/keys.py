"""The schema as a flat table: `section.name` to what may stand there, in the order of the file."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flame_train.config.schema import Config


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key.

    `annotation` is its Python type, `limits` its bounds in words ("from 1 to 4096"), `choices` the values of a closed
    list. `expected` combines them for a message.
    """

    section: str
    name: str
    annotation: Any
    default: Any
    doc: str
    unit: str
    free: bool
    place: bool
    aka: tuple[str, ...]
    instead_of: str
    """The usual key, whose value holds where this one is 0."""
    only: Mapping[str, tuple[str, ...]]
    """Where the key means something for some choices alone: the choice's key and the names that have this one."""
    from_table: bool
    """Whether it is a key of something that the config chooses."""
    defaults: Mapping[str, Any]
    """The key's default for each choice that has it, by the name that `chosen_by` chooses."""
    chosen_by: str
    limits: str
    choices: tuple[str | int, ...]
    any_case: bool
    """Whether a choice may be written in any case, as other trainers write their optimizers."""
    known: Mapping[str, str]
    """Names of a choice elsewhere, in lower case, and the choice that has their meaning."""
    expected: str

    @property
    def path(self) -> str:
        """`section.name`, as messages and `--set` write it."""
        return f"{self.section}.{self.name}"

    def default_among(self, values: Mapping[str, Any]) -> Any:
        """Returns the default in a config with these values by path; they determine the choices."""
        chosen = values.get(self.chosen_by, "")
        return self.defaults.get(chosen, self.default) if isinstance(chosen, str) else self.default

    @property
    def is_list(self) -> bool:
        """Whether the value is, or may be, a list in the file (a tuple in Python)."""
        return _list_part(self.annotation) is not None

    @property
    def is_tables(self) -> bool:
        """Whether it is a list of tables, written as [[section.name]]."""
        entry = get_args(_list_part(self.annotation))[0] if self.is_list else None
        return isinstance(entry, type) and issubclass(entry, BaseModel)

    @property
    def has_short_form(self) -> bool:
        """Whether a table of its list may be written as a string; a list of other tables stands in no template."""
        return self.is_tables and hasattr(get_args(self.annotation)[0], "short")

    @property
    def table_places(self) -> tuple[str, ...]:
        """The keys of such a table whose values are files or folders."""
        if not self.is_tables:
            return ()
        fields = get_args(self.annotation)[0].model_fields
        return tuple(name for name, info in fields.items() if _facts(info)["place"])

    def with_places(self, value: Any, changed: Callable[[str], str]) -> Any:
        """Returns `value` with each file and folder in it `changed`; tables of a list as dicts, sorted by key."""
        if self.place:
            return each_place(value, changed)
        if not self.is_tables or not isinstance(value, tuple | list):
            return value
        return tuple(
            {
                name: each_place(inner, changed) if name in self.table_places else inner
                for name, inner in _given(table).items()
            }
            for table in value
        )


def each_place(value: Any, changed: Callable[[str], str]) -> Any:
    """Returns a file or folder, or each of a list, `changed`; anything else as it is."""
    if isinstance(value, tuple | list):
        return tuple(each_place(inner, changed) for inner in value)
    return changed(value) if isinstance(value, str) and value else value


def _given(table: Any) -> dict[str, Any]:
    """Returns the keys that a table gives, sorted; tables in it likewise."""
    if isinstance(table, BaseModel):
        table = {name: getattr(table, name) for name in table.model_fields_set}
    if not isinstance(table, Mapping):
        return {"": table}
    return {
        name: _given(inner) if isinstance(inner, BaseModel | Mapping) else inner
        for name, inner in sorted(table.items())
    }


@functools.cache
def keys() -> types.MappingProxyType[str, Key]:
    """Returns every key of the schema by its path."""
    table = {}
    for section, section_doc in sections().items():
        fields = section_doc.model_fields.items()
        for name, info in sorted(fields, key=lambda item: not _facts(item[1])["leads"]):
            key = key_of(section, name, info)
            table[key.path] = key
    return types.MappingProxyType(table)


def sections() -> dict[str, type[BaseModel]]:
    """Returns the tables of the file by name, in order."""
    return {name: _model(info) for name, info in Config.model_fields.items()}


def _model(info: FieldInfo) -> type[BaseModel]:
    assert isinstance(info.annotation, type)
    assert issubclass(info.annotation, BaseModel)
    return info.annotation


def _facts(info: FieldInfo) -> dict[str, Any]:
    assert isinstance(info.json_schema_extra, dict), "a key was not declared with field()"
    return dict(info.json_schema_extra)


def applies(key: Key, section: BaseModel) -> bool:
    """Says whether the choice that `section` makes has the key."""
    return all(getattr(section, path.split(".")[1]) in names for path, names in key.only.items())


def key_of(section: str, name: str, info: FieldInfo) -> Key:
    """Returns the key that a field of a section declares."""
    facts = _facts(info)
    return Key(
        section=section,
        name=name,
        annotation=info.annotation,
        default=facts.get("default", info.default),
        doc=info.description or "",
        unit=facts["unit"],
        free=facts["free"],
        place=facts["place"],
        aka=tuple(facts["aka"]),
        instead_of=facts["instead_of"],
        only={f"{section}.{key}": tuple(names) for key, names in facts["only"].items()},
        from_table="default" in facts,
        defaults=facts.get("defaults", {}),
        chosen_by=f"{section}.{facts.get('chosen_by', '')}",
        limits=_limits(info),
        choices=_choices(info),
        any_case=facts["leads"],
        known=facts.get("known", {}),
        expected=_expected(info),
    )


_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
_PLURALS = {str: "strings", int: "integers", float: "numbers"}


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a union, such as a word or a number; else the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _list_part(annotation: Any) -> Any:
    return next((part for part in _parts(annotation) if get_origin(part) is tuple), None)


def _choices(info: FieldInfo) -> tuple[str | int, ...]:
    return tuple(value for part in _parts(info.annotation) if get_origin(part) is Literal for value in get_args(part))


def _expected(info: FieldInfo) -> str:
    annotation = info.annotation
    if choices := _choices(info):
        quoted = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices]
        words = quoted[0] if len(quoted) == 1 else "one of " + ", ".join(quoted)
        numbers = [part for part in _parts(annotation) if get_origin(part) is Annotated]
        kinds = [words, *(f"{_WORDS[get_args(part)[0]]} {_limits(info)}".rstrip() for part in numbers)]
        return " or ".join([*kinds, *([_list(part)] if (part := _list_part(annotation)) else [])])
    if get_origin(annotation) is tuple:
        return _list(annotation)
    assert isinstance(annotation, type)
    return f"{_WORDS[annotation]} {_limits(info)}".rstrip()


def _list(annotation: Any) -> str:
    arguments = get_args(annotation)
    entry = arguments[0]
    bounds = _limits_of(get_args(entry)[1:]) if get_origin(entry) is Annotated else ""
    kind = get_args(entry)[0] if bounds else entry
    if issubclass(kind, BaseModel):
        strings = "strings, or of " if hasattr(kind, "short") else ""
        return f"a list of {strings}tables of {', '.join(kind.model_fields)}"
    count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
    return f"a list of {count}{_PLURALS[kind]} {bounds}".rstrip()


def _limits(info: FieldInfo) -> str:
    of_parts = [
        fact for part in _parts(info.annotation) if get_origin(part) is Annotated for fact in get_args(part)[1:]
    ]
    return _limits_of([info, *of_parts])


def _limits_of(facts: Iterable[FieldInfo]) -> str:
    limits = {
        name: getattr(constraint, name)
        for fact in facts
        for constraint in fact.metadata
        for name in ("ge", "gt", "le", "lt", "multiple_of")
        if hasattr(constraint, name)
    }
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    if "ge" in limits and "le" in limits:
        parts = [f"from {limits['ge']} to {limits['le']}"]
    else:
        parts = [" and ".join(f"{sign} {limits[name]}" for name, sign in signs.items() if name in limits)]
    if "multiple_of" in limits:
        parts.append(f"a multiple of {limits['multiple_of']}")
    return ", ".join(part for part in parts if part)
