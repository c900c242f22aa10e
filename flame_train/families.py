"""The list of model families: the one line that a new family adds. The rest of it is its folder in `models`.

It stands apart because the command line is made from it, and answers `--help` without loading anything. What stands
below the families reads their `family.toml` here, and imports none of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

FAMILY_TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sdxl": "SDXL",
        "sd15": "SD 1.5 or 2.1",
        "sd3": "SD3 or SD3.5",
        "flux": "Flux.1",
        "zimage": "Z-Image",
        "flux2": "FLUX.2",
        "flux3": "FLUX.3 klein",
        "chroma": "Chroma",
        "krea2": "Krea 2",
        "anima": "Anima",
        "qwenimage1": "Qwen-Image 1",
        "qwenimage": "Qwen-Image 2.1",
        "wan": "Wan 2.2",
    }
)
"""Name -> usual name. `models.<name>.family` has its `Family`, `<name>-lora` is its command."""


@cache
def family_data(family: str) -> Mapping[str, Any]:
    """Returns what a family's `family.toml` says; nothing of one that has none, or is none."""
    file = Path(__file__).parent / "models" / family / "family.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if family in FAMILY_TITLES and file.is_file() else {}


def usual_keys(family: str) -> Mapping[str, Any]:
    """Returns the values with which a config of a family begins, by key, where they are not the defaults."""
    keys: Mapping[str, Any] = family_data(family).get("keys", {})
    return keys


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


@dataclass(frozen=True, slots=True)
class Licence:
    """What is known of the terms of published weights; no advice.

    Attributes:
        model: their name on the hub.
        called: globs over the names of their files, in lower case, without the ending.
        terms: the licence's name.
        source: the page that says so.
        read: when it said so.
    """

    model: str
    called: tuple[str, ...]
    terms: str
    source: str
    read: date

    def is_of(self, checkpoint: str) -> bool:
        """Tells whether a checkpoint, a file or `hf:owner/name`, is called as these weights are."""
        place = checkpoint.lower().removeprefix("hf:").replace("\\", "/").rstrip("/")
        repositories = place.replace("models--", "").replace("--", "/")  # as the hub's cache calls them
        stem = place.rpartition("/")[2].removesuffix(".safetensors").removesuffix(".gguf")
        named = f"/{self.model.lower()}/" in f"/{repositories}/"
        return named or any(fnmatchcase(stem, pattern) for pattern in self.called)


def licences(family: str) -> tuple[Licence, ...]:
    """Returns what is known of the licences of a family's published weights."""
    return tuple(Licence(**{**row, "called": tuple(row["called"])}) for row in family_data(family).get("licences", ()))


def licence_of(family: str, checkpoint: str) -> dict[str, str] | None:
    """Returns the `model`, `terms`, `source` and `read` of what is known by a checkpoint's name; None: nothing."""
    known = next((each for each in licences(family) if each.is_of(checkpoint)), None)
    if known is None:
        return None
    return {"model": known.model, "terms": known.terms, "source": known.source, "read": known.read.isoformat()}


def told_terms(licence: Mapping[str, str] | None) -> str:
    """Says what `licence_of` knows, with the source and its date."""
    if licence is None:
        return "not known of a checkpoint of this name"
    return f"{licence['terms']}, of {licence['model']} by its name ({licence['source']}, read {licence['read']})"


def published_terms(family: str) -> str:
    """Says what is known of the terms of a family's published weights."""
    rows = [f"{each.model} {each.terms}" for each in licences(family)]
    read = max((each.read for each in licences(family)), default=None)
    return f"published weights, as read on {read}: {'; '.join(rows)}" if rows else "not known"
