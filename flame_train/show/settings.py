"""The settings of a run, from its `config.toml`, beside the defaults of the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from flame_train.config.keys import keys
from flame_train.config.render import toml_value
from flame_train.io.json_values import toml_tree


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the config, its value as TOML writes it. `default` is None for a key that this version lacks."""

    path: str
    value: str
    default: str | None
    doc: str

    @property
    def differs(self) -> bool:
        """Whether the value is another than the default."""
        return self.default is not None and self.value != self.default


def tree_of(text: str) -> dict[str, Any]:
    """The tables of a `config.toml`; none if it makes no sense."""
    try:
        return toml_tree(text)
    except ValueError:
        return {}


def settings_of(tree: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Every key of a resolved config, in the order of its file."""
    values = dict(_flat(tree))
    return tuple(_setting(path, value, values) for path, value in values.items())


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, table in tree.items():
        if isinstance(table, Mapping):
            yield from ((f"{section}.{name}", value) for name, value in table.items())


def _setting(path: str, value: Any, values: Mapping[str, Any]) -> Setting:
    key = keys().get(path)
    if key is None:
        return Setting(path, toml_value(value), None, "")
    return Setting(path, toml_value(value), toml_value(key.default_among(values)), key.doc)


def without_folders(setting: Setting) -> Setting:
    """The setting with files and folders by their last name: a report may be sent to others."""
    key = keys().get(setting.path)
    if key is None or not (key.place or key.table_places):
        return setting
    try:
        value = toml_tree(f"value = {setting.value}")["value"]
    except ValueError:
        return setting
    changed = key.with_places(value, lambda place: PurePath(place).name)
    return Setting(setting.path, toml_value(changed), setting.default, setting.doc)
