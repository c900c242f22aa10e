"""`flame-train init`: a commented config that a person edits."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from flame_train.config.load import from_options
from flame_train.config.render import commented, short
from flame_train.config.schema import Config
from flame_train.config.suggest import did_you_mean
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.files import refuse_place
from flame_train.errors import ConfigError
from flame_train.tools.presets import preset

_MUST: Final = ("model.checkpoint", "data.path", "output.dir")


def template(family: str, name: str | None = None, card: float | None = None, full: bool = False) -> str:
    """The commented config of `family`.

    Args:
        family: a model family.
        name: a preset, for what is trained.
        card: GB of the card that it is to fit.
        full: whether every key is in it, as without preset and card.

    Returns:
        The text of a TOML file.

    Raises:
        ConfigError: there is no such family or preset.
    """
    from flame_train.models.registry import FAMILIES

    if family not in FAMILIES:
        near = difflib.get_close_matches(family.removesuffix("-lora"), FAMILIES, n=1)
        raise ConfigError(f"expected a model family ({', '.join(FAMILIES)}), got {family}{did_you_mean(near)}")
    title, licence = f"A LoRA for {FAMILIES[family].title}: flame-train train FILE", FAMILIES[family].licence
    title += f"\n# {licence}" if licence else ""
    if name is None and card is None:
        return commented(Config(), title, FAMILIES[family].unsupported_keys())
    chosen = preset(family, name, card)
    if not full:
        more = "Every other key has its default; `flame-train init FAMILY --full` writes them all."
        return short(chosen.values, title, (*_MUST, *chosen.must), (*chosen.notes, more))
    sections: dict[str, dict[str, object]] = {}
    for path, value in chosen.values.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = value
    text = commented(from_options(**sections), title, FAMILIES[family].unsupported_keys())
    return "".join(f"# {note}\n" for note in chosen.notes) + text


def write_template(
    family: str, path: Path, force: bool = False, name: str | None = None, card: float | None = None, full: bool = False
) -> None:
    """Write the commented config of `family`.

    Args:
        family, name, card, full: as in `template`.
        path: the TOML file.
        force: whether a file that is there already is overwritten.

    Raises:
        ConfigError: as `template` does, and for a path without .toml.
        OutputError: the file cannot be written, or exists without `force`.
    """
    raw = template(family, name, card, full).encode()
    refuse_place(path, ".toml", force)
    write_atomically(path, [raw], len(raw))
