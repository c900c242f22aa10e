"""The list of model families: the one line that a new family adds. The rest of it is its folder in `models`.

It stands apart because the command line is made from it, and answers `--help` without loading anything. What stands
below the families reads their `family.toml` here, and imports none of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

FAMILY_TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sdxl": "SDXL",
        "sd3": "SD3 or SD3.5",
        "flux": "Flux.1",
        "zimage": "Z-Image",
        "flux2": "FLUX.2 klein",
        "flux3": "FLUX.3 klein",
        "chroma": "Chroma",
        "krea2": "Krea 2",
        "anima": "Anima",
        "qwenimage1": "Qwen-Image 1",
        "qwenimage": "Qwen-Image 2.1",
    }
)
"""Name -> usual name. `models.<name>.family` has its `Family`, `<name>-lora` is its command."""


@cache
def family_data(family: str) -> Mapping[str, Any]:
    """Returns what a family's `family.toml` says; nothing of one that has none, or is none."""
    file = Path(__file__).parent / "models" / family / "family.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if family in FAMILY_TITLES and file.is_file() else {}


def training_adapters(family: str) -> list[Mapping[str, str]]:
    """Lists the published training adapters of a family: `of` which model, the `file` on the hub, and `by` whom."""
    rows: list[Mapping[str, str]] = family_data(family).get("training_adapters", [])
    return rows


def with_control_images() -> str:
    """Returns the models that look at control images, as words of a message."""
    titles = (family_data(family).get("looks_at_control_images") for family in FAMILY_TITLES)
    *others, last = (name for name in titles if name)
    return f"{', '.join(others)} and {last}"


def named_by(trainer: str) -> dict[str, str]:
    """Returns what another trainer's configs call the families: its names, each with the family's here."""
    return {
        name: family
        for family in FAMILY_TITLES
        for name in family_data(family).get("other_trainers", {}).get(trainer, ())
    }
