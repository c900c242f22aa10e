"""`flame-train init`: a commented config that a person edits."""

from __future__ import annotations

import difflib
from pathlib import Path

from flame_train.config.render import commented
from flame_train.config.schema import Config
from flame_train.config.suggest import did_you_mean
from flame_train.disk.durable import write_durably
from flame_train.disk.files import refuse_place
from flame_train.errors import ConfigError


def template(family: str) -> str:
    """The commented config of `family`. Raises ConfigError if there is no such family."""
    from flame_train.recipes import FAMILIES

    if family not in FAMILIES:
        near = difflib.get_close_matches(family.removesuffix("-lora"), FAMILIES, n=1)
        raise ConfigError(f"expected a model family ({', '.join(FAMILIES)}), got {family}{did_you_mean(near)}")
    found = FAMILIES[family]
    title = f"A LoRA for {found.title}: flame-train train FILE"
    return commented(Config(), title, found.unsupported_keys())


def write_template(family: str, path: Path, force: bool = False) -> None:
    """Write the commented config of `family` to `path`.

    Raises ConfigError for an unknown family or a `path` without .toml. Raises OutputError if it cannot be written, or
    exists without `force`.
    """
    raw = template(family).encode()
    refuse_place(path, ".toml", force)
    write_durably(path, [raw], len(raw))
