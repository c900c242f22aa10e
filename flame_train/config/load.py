"""A configuration file and `--set` overrides to a checked `Config`, or one report of everything wrong."""

from __future__ import annotations

import datetime
import difflib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flame_train.config.checks import checks
from flame_train.config.keys import Key, each_place, keys, sections
from flame_train.config.located import ConfigWithSource, place_of
from flame_train.config.own_code import unregistered
from flame_train.config.read import Layered, given_layer, read_layers
from flame_train.config.schema import REPEATED, Config
from flame_train.config.suggest import answer, did_you_mean, nearest_section
from flame_train.config.training_sections import LONGEST_RUN
from flame_train.errors import ConfigError, ModelFileError, kind_of
from flame_train.io.json_values import toml_tree

_OVERRIDE = "--set"
_WITH_COMMA = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its place (`file:line` or `--set`), its key, the expected and the actual value."""

    place: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.message}"


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """Loads as `load_located`, for whoever needs no places."""
    return load_located(source, overrides).config


def load_located(
    source: str | Mapping[str, Any], overrides: Sequence[str] = (), lacking: Collection[str] = ()
) -> ConfigWithSource:
    """Returns the configuration in `source` with each `section.key=value` of `overrides` on top.

    `source` is a path, `-` for standard input, or the sections as a mapping.
    A value of `overrides` is read as TOML where that fits the key, else as text. No message suggests a key
    of `lacking`. Raises ConfigError with every problem of the files and the
    overrides, one a line, in the order of the files.
    """
    if not isinstance(source, str | Mapping):
        raise ConfigError(f"expected the path of a config, or its sections as a mapping; got {kind_of(source)}")
    if not isinstance(overrides, list | tuple) or not all(isinstance(each, str) for each in overrides):
        raise ConfigError(f"expected a list of section.key=value as overrides, got {kind_of(overrides)}")
    layered = read_layers(source) if isinstance(source, str) else given_layer(source)
    config, problems = _checked(layered, overrides, lacking)
    if problems:
        raise ConfigError(_report(problems, layered))
    return ConfigWithSource(config, layered)


def problems_in(tree: Mapping[str, Any]) -> list[Problem]:
    """Returns everything that is wrong with these sections."""
    return checked(given_layer(tree))[1]


def checked(layered: Layered) -> tuple[ConfigWithSource, list[Problem]]:
    """Returns the settings, of which wrong ones have their defaults, and everything that is wrong."""
    config, problems = _checked(layered, ())
    return ConfigWithSource(config, layered), problems


def _checked(layered: Layered, overrides: Sequence[str], lacking: Collection[str] = ()) -> tuple[Config, list[Problem]]:
    problems = _apply(layered, overrides, lacking)
    problems += _unknown(layered, lacking)
    config, wrong = _validate(layered)
    config = _by_epochs(config)
    problems += wrong
    bad = {problem.key for problem in problems}
    problems += _cross_checks(config, layered, bad)
    return config, _naming_scripts(config, problems) if problems else []


def _naming_scripts(config: Config, problems: Iterable[Problem]) -> list[Problem]:
    """Answers problems with keys that the run of the run folder had from a script: which script that is."""
    said = unregistered(Path(config.output.dir)) if config.output.dir else {}
    return [
        replace(p, message=f"{p.message.partition('; ')[0]}; {said[p.key]}") if p.key in said else p for p in problems
    ]


def _by_epochs(config: Config) -> Config:
    """Returns the config with the default interval in steps at 0 where one in epochs is written."""
    changed: dict[str, Any] = {}
    for name in REPEATED:
        section = getattr(config, name)
        if section.every_epochs and "every" not in section.model_fields_set:
            changed[name] = section.model_copy(update={"every": 0})
    if config.train.epochs and "steps" not in config.train.model_fields_set:
        changed["train"] = config.train.model_copy(update={"steps": LONGEST_RUN})
    return config.model_copy(update=changed)


def from_options(**sections: dict[str, Any]) -> Config:
    """The configuration that a command's options ask for, `section={key: value}`; every other key has its default.

    Raises ConfigError with every option that is wrong, by its name. Rules between keys hold where all are options.
    """
    tree = _known_part(sections)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        wrong = [keys()[path] for path in dict.fromkeys(map(".".join, _wrong_keys(error)))]
        problems = [f"{_option(key)}: {_wrong_option(error, key, tree[key.section][key.name])}" for key in wrong]
        raise ConfigError("; ".join(problems)) from None
    paths = {f"{section}.{name}" for section, options in tree.items() for name in options}
    answerable = (check for check in checks() if paths.issuperset(check.paths))
    broken = [
        f"{_option(keys()[check.paths[0]])}: {message}" for check in answerable if (message := check.broken(config))
    ]
    if broken:
        raise ConfigError("; ".join(broken))
    return config


def with_overrides(sections: dict[str, dict[str, Any]], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`sections` as `from_options` takes them, with `--set` values laid over. Raises ConfigError for unknown keys."""
    layered = Layered({name: dict(options) for name, options in sections.items()}, {})
    if problems := _apply(layered, overrides):
        raise ConfigError("; ".join(map(str, problems)))
    return layered.tree


def _wrong_option(error: ValidationError, key: Key, value: Any) -> str:
    """Says what is wrong with an option's value; of prompts, which of them and why."""
    if not key.is_tables:
        return _wrong_value(key, value)
    number = next(int(item["loc"][2]) for item in error.errors() if item["loc"][:2] == (key.section, key.name))
    return f"{_shown(value[number])}: {_wrong_table(error, key).rpartition(f'{key.path} {number + 1}: ')[2]}"


@contextmanager
def with_option_names() -> Iterator[None]:
    """Within, each line of an error that begins with a key begins with the option of that name instead."""
    try:
        yield
    except (ConfigError, ModelFileError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else ModelFileError
        raise kind("\n".join(map(_by_option, str(error).splitlines()))) from error


def _by_option(line: str) -> str:
    path, colon, rest = line.partition(":")
    key = keys().get(path)
    return f"{_option(key)}{colon}{rest}" if key else line


def _option(key: Key) -> str:
    """Returns `--t5-vocabulary` for model.t5_vocabulary; that of a list is given for each item, as `--prompt`."""
    name = key.name.removesuffix("s") if key.is_list else key.name
    return f"--{name.replace('_', '-')}"


def _apply(layered: Layered, overrides: Sequence[str], lacking: Collection[str] = ()) -> list[Problem]:
    """Lay the overrides over the tree. Values that do not fit are returned as problems."""
    problems = []
    for override in overrides:
        path, equals, raw = override.partition("=")
        path = path.strip()
        key = keys().get(path)
        if not equals:
            problems.append(Problem(_OVERRIDE, path, "expected section.key=value, got no ="))
        elif path in sections():
            problems.append(Problem(_OVERRIDE, path, "expected section.key=value, got a section"))
        elif key is None:
            problems.append(Problem(_OVERRIDE, path, "unknown key" + answer(path, lacking)))
        else:
            table = layered.tree.setdefault(key.section, {})
            if isinstance(table, dict):
                table[key.name] = typed(raw.strip(), key)
                layered.places[(key.section, key.name)] = _OVERRIDE
    return problems


def typed(raw: str, key: Key) -> Any:
    """Returns `raw` as the TOML value it spells, or as text where it spells none or the key wants text."""
    try:
        parsed = toml_tree(f"v = {raw}")
        value = parsed["v"] if len(parsed) == 1 else raw
    except ValueError:
        value = raw
    if (key.annotation is str or raw in key.choices) and not isinstance(value, str):
        return raw
    looks_like_list = raw.startswith("[") and raw.endswith("]")
    alone = key.is_list and isinstance(value, str) and value not in key.choices
    return [value] if alone and not looks_like_list else value


def _unknown(layered: Layered, lacking: Collection[str]) -> list[Problem]:
    problems = []
    for section, table in layered.tree.items():
        if section not in sections():
            problems += _unknown_section(layered, section, table, lacking)
        elif isinstance(table, dict):
            for name in table:
                path = f"{section}.{name}"
                if path not in keys():
                    problems.append(
                        Problem(place_of(layered, (section, name)), path, "unknown key" + answer(path, lacking))
                    )
        else:
            message = f"expected a table of keys, got {_shown(table)}"
            problems.append(Problem(place_of(layered, (section,)), section, message))
    return problems


def _unknown_section(layered: Layered, section: str, table: Any, lacking: Collection[str]) -> list[Problem]:
    """Returns one problem; of a section one more for each key in it that belongs elsewhere."""
    place = place_of(layered, (section,))
    if not isinstance(table, dict):
        return [Problem(place, section, "unknown key" + answer(section, lacking))]
    if near := did_you_mean(nearest_section(section)):
        return [Problem(place, section, "unknown section" + near)]
    problems = [Problem(place, section, "unknown section; `flame-train init FAMILY` writes all there are")]
    for name in table:
        if advice := answer(name, lacking, otherwise=""):
            problems.append(Problem(place_of(layered, (section, name)), f"{section}.{name}", "unknown key" + advice))
    return problems


def _known_part(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the keys of `tree` that exist, lists as the tuples the schema has, ~ in places as the user's home."""
    return {
        section: {
            name: _as_key(value, keys()[f"{section}.{name}"])
            for name, value in table.items()
            if f"{section}.{name}" in keys()
        }
        for section, table in tree.items()
        if section in sections() and isinstance(table, dict)
    }


def _as_table(item: Any, key: Key) -> Any:
    """Returns a table of a list: lists in it as tuples, ~ in places as the user's home."""
    if not isinstance(item, dict):
        return item
    return {
        name: each_place(value, os.path.expanduser) if name in key.table_places else _frozen(value)
        for name, value in item.items()
    }


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(inner) for name, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _as_key(value: Any, key: Key) -> Any:
    if key.place:
        return each_place(value, os.path.expanduser)
    if isinstance(value, list) and key.is_list:
        return tuple(_as_table(item, key) for item in value)
    if isinstance(value, str) and key.any_case:
        return next((choice for choice in key.choices if str(choice).lower() == value.lower()), value)
    return value


def _validate(layered: Layered) -> tuple[Config, list[Problem]]:
    """Returns the config and its wrong values; in the config those have their defaults, so that checks can go on."""
    tree = _known_part(layered.tree)
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        failed, wrong = error, dict.fromkeys(_wrong_keys(error))
    problems = []
    for section, name in wrong:
        key = keys()[f"{section}.{name}"]
        message = _wrong_value(key, layered.tree[section][name])
        message += _wrong_table(failed, key) if key.is_tables else ""
        problems.append(Problem(place_of(layered, (section, name)), key.path, message))
        del tree[section][name]
    return Config.model_validate(tree), problems


def _wrong_keys(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yields (section, name) of each wrong value. A default that depends on a wrong choice is no further problem."""
    for item in error.errors():
        if item["type"] != "default_factory_not_called":
            yield str(item["loc"][0]), str(item["loc"][1])


def _wrong_table(error: ValidationError, key: Key) -> str:
    problem = next(item for item in error.errors() if item["loc"][:2] == (key.section, key.name))
    number, *rest = problem["loc"][2:] or ("",)
    if problem["type"] == "value_error":
        where = f"{key.path} {number + 1}" if isinstance(number, int) else key.path
        return f"; in {where}: {problem['ctx']['error']}"
    where = f"{key.path} {number + 1}" if isinstance(number, int) else key.path
    words = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"].lower()
    return f"; in {where}: {words}" if not rest else f"; in {where}: {'.'.join(map(str, rest))}: {words}"


def _wrong_value(key: Key, value: Any) -> str:
    if isinstance(value, str) and key.annotation is float and _WITH_COMMA.fullmatch(value):
        return f"expected {key.expected}, got {_shown(value)}; write {value.replace(',', '.')}, with a point"
    message = f"expected {key.expected}, got {_shown(value)}"
    if isinstance(value, str) and key.choices:
        names = [str(choice) for choice in key.choices]
        known = key.known.get(value.lower())
        near = [known] if known else difflib.get_close_matches(value.lower(), names, n=1)
        return message + did_you_mean([f'"{choice}"' for choice in near])
    return message


def _cross_checks(config: Config, layered: Layered, bad: set[str]) -> list[Problem]:
    problems = []
    for check in checks():
        if bad.isdisjoint(check.paths) and bad.isdisjoint(path.split(".")[0] for path in check.paths):
            message = check.broken(config)
            if message is not None:
                problems.append(_problem_at(check.paths, message, layered))
    return problems


def _problem_at(paths: Iterable[str], message: str, layered: Layered) -> Problem:
    subject, *_ = paths
    for path in paths:
        section, name = path.split(".")
        if (section, name) in layered.places:
            return Problem(layered.places[(section, name)], subject, message)
    return Problem(place_of(layered, (subject.split(".")[0],)), subject, message)


def _shown(value: Any) -> str:
    """Returns `value` as a reader of the file knows it, at most 60 characters."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = '"' + value.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'
    elif isinstance(value, dict):
        text = "a table"
    elif isinstance(value, datetime.date | datetime.time):
        text = f"the date {value}"
    elif isinstance(value, int) and value.bit_length() > 200:
        text = "a huge integer"
    else:
        text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _report(problems: list[Problem], layered: Layered) -> str:
    def order(problem: Problem) -> tuple[int, int]:
        name, _, line = problem.place.rpartition(":")
        if name in layered.files:
            return layered.files.index(name), int(line)
        return (len(layered.files), 0) if problem.place == _OVERRIDE else (layered.files.index(problem.place), 0)

    return "\n".join(str(problem) for problem in sorted(problems, key=order))
