"""What a table of another trainer's settings is made of: a row says where one setting went, and how it is converted.

`config.conversion` applies the rows, and messages about unknown keys read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from flame_train.errors import ConfigError
from flame_train.families import family_data

Tree = Mapping[str, Any]


def facts_of(family: str) -> Mapping[str, Any]:
    """Says what `[as_others_train]` of the family's `family.toml` says."""
    facts: Mapping[str, Any] = family_data(family).get("as_others_train", {})
    return facts


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the other program's config, and the place where it was written.

    `written` is how the file has it, where it calls or counts it in another way than the table does.
    """

    value: Any
    place: str
    written: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Another program's config: its settings by dotted name, its sets of images, and the model family it is for.

    `notes` are files that it names and that could not be read, each with its place. `idle` are further settings that
    need no key here, each with the reason. `asked` are those that conversions have read so far, beside their own.
    """

    family: str
    settings: Mapping[str, Setting]
    sets: Sequence[Mapping[str, Setting]] = ()
    notes: Sequence[str] = ()
    idle: Mapping[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set, compare=False, repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of the setting `name`, which `asked` then has."""
        setting = self.settings.get(name)
        if setting is not None:
            self.asked.add(name)
        return default if setting is None else setting.value

    @property
    def may_have_controls(self) -> bool:
        """Says whether a model of this family looks at control images; where the family is not known, one may."""
        return not self.family or "looks_at_control_images" in family_data(self.family)

    def fact(self, name: str) -> Any:
        """Returns what `[as_others_train]` of the family's `family.toml` says of `name`; None where it says nothing."""
        return facts_of(self.family).get(name)


@dataclass(frozen=True, slots=True)
class Lost:
    """The answer of a conversion: nothing is carried over, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The answer of a conversion whose value needs a remark; `lost` are reasons why parts of it are not carried."""

    value: Any
    remark: str
    lost: tuple[str, ...] = ()


class Nothing:
    """The answer of a conversion: flame-train does the same without a key."""


NOTHING: Final = Nothing()

Convert = Callable[[Any, Source], Any]
NO_CONTROL: Final = "this model looks at no control images here"


def keep(value: Any, source: Source) -> Any:
    """Returns the value as it is."""
    return value


@dataclass(frozen=True, slots=True)
class Row:
    """Where one setting of another program went.

    Attributes:
        key: its name there, dotted below sections; * stands for anything.
        to: our keys, `section.name`, or `set.name` for a set of images. None: it has no counterpart.
        convert: from the value there to ours, or to a mapping of several of `to`; or Lost, Changed or NOTHING.
        absent: what the program does where its config is silent and flame-train would do something else.
        families: the families for which the row holds; empty: all.
        say: the answer to somebody who writes the key into a config of flame-train; empty: whatever is spelled like it.
        at: file and line of the program's source that say what the setting does.
        inert: why no value of it changes what a run makes; empty: some value does.
        read: whether the conversions of other settings read it, and this row has no answer of its own.
    """

    key: str
    to: tuple[str, ...] = ()
    convert: Convert = keep
    absent: Any = None
    families: tuple[str, ...] = ()
    say: str = ""
    at: str = ""
    inert: str = ""
    read: bool = False

    def holds(self, name: str, family: str) -> bool:
        """Says whether the row is about the setting `name`."""
        return fnmatchcase(name, self.key) and (not self.families or family in self.families)


def is_off(value: Any) -> bool:
    """Says whether a value means that a thing is not used."""
    named = (None, False, "", 0, "0", "0.0", "none", "None", "NONE", "NEVER", "off", "false", "False")
    return value in named or value in ([], {})


class Table(NamedTuple):
    """The rows of another trainer.

    Attributes:
        rows: where its settings went. The first row that holds is the answer; of two settings with one counterpart
            the one whose row comes first.
        set_rows: where the settings of a set of images went.
    """

    rows: Sequence[Row]
    set_rows: Sequence[Row] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """Another trainer.

    Attributes:
        name: as its users call it.
        is_mine: whether a tree is a config of this program.
        read: from a tree to its settings and sets.
        table: reads its rows; once, when they are needed.
        repository: the repository and commit that the rows' `at` are places in.
    """

    name: str
    is_mine: Callable[[Tree], bool]
    read: Callable[[Reading], Source]
    table: Callable[[], Table]
    repository: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A parsed file of another program, as its `Program.read` gets it.

    Attributes:
        tree: the values.
        lines: the line of each key by its path; list items are `[0]`, `[1]`, ...
        file: the name of the file, for places.
        folder: the folder it lies in, None for standard input.
        family: the family that the user named, or "".
        script: the program's script in a saved command line, or "".
        beside: reads a file that the config names, from the folder or one above; None where there is none.
    """

    tree: Tree
    lines: Mapping[tuple[str, ...], int]
    file: str
    folder: Path | None
    family: str
    script: str
    beside: Callable[[str], Reading | None] = field(repr=False)

    def place(self, path: tuple[str, ...]) -> str:
        """Returns `file:line` of a key."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"

    def flat(self, tree: Tree, at: tuple[str, ...] = (), whole: Sequence[str] = ()) -> dict[str, Setting]:
        """Returns the settings in `tree`, `at` a path, by dotted names; the tables `whole` are values themselves."""
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{self.place(at)}: expected a table of settings, got {type(tree).__name__}")
        settings: dict[str, Setting] = {}
        for name, value in tree.items():
            path = (*at, name)
            if isinstance(value, Mapping) and name not in whole:
                settings |= {f"{name}.{below}": setting for below, setting in self.flat(value, path, whole).items()}
            else:
                settings[name] = Setting(value, self.place(path))
        return settings


def no_file(setting: str, named: Setting, what: str) -> str:
    """Returns the note about a file that a config names and that is not there."""
    return f"{named.place}: {setting} = {named.value!r}: no such file beside this one; {what} missing here"
