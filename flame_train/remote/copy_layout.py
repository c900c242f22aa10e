"""A copy of a run folder in a store: the same names as here, and checkpoints that are whole once their manifest is.

A checkpoint's manifest is written after its files and removed before them. So what has one is whole, and what has
none is the rest of an upload or of a removal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from flame_train.errors import RemoteError
from flame_train.io.commit import FORMAT, MANIFEST
from flame_train.io.json_values import json_tree, table, text, whole

from .store import Store

CHECKPOINTS: Final = "checkpoints"
SAMPLES: Final = "samples"
CONFIG: Final = "config.toml"
LOG: Final = "log.jsonl"
LARGEST: Final = 1 << 20  # bytes of a manifest, config or status
_STEP: Final = re.compile(r"step-(\d{6,})")
_FILE: Final = re.compile(r"(?!\.\.?$)[^/\\\x00-\x1f]{1,250}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint's manifest says: the size and SHA-256 of each file."""

    step: int
    files: dict[str, tuple[int, str]]
    raw: bytes


def folder_of(step: int) -> str:
    """Returns the name of a checkpoint's folder, relative to the run folder."""
    return f"{CHECKPOINTS}/step-{step:06d}"


def steps_in(store: Store) -> list[int]:
    """Returns the step of each checkpoint in the store, whole or not, newest first."""
    matches = (_STEP.fullmatch(name) for name, entry in store.names(CHECKPOINTS).items() if entry is None)
    return sorted((int(match.group(1)) for match in matches if match), reverse=True)


def manifest_in(store: Store, step: int) -> Manifest | None:
    """Returns the manifest of a checkpoint in the store; None where there is none, or a damaged one.

    Raises RemoteError for one of a newer version of this program.
    """
    raw = store.read(f"{folder_of(step)}/{MANIFEST}", LARGEST)
    return None if raw is None else parsed(raw, step, store.address)


def parsed(raw: bytes, step: int, where: str) -> Manifest | None:
    """Parses a manifest's bytes; None where they are not those of a manifest of `step`."""
    tree = table(json_tree(raw))
    form = whole(tree.get("format")) or 0
    if form > FORMAT:
        raise RemoteError(
            f"{where}: written by a newer flame-train (checkpoint format {form}, this version reads "
            f"{FORMAT}); update flame-train to continue this run"
        )
    files = dict[str, tuple[int, str]]()
    for name, entry in table(tree.get("files")).items():
        size, digest = whole(table(entry).get("size")), text(table(entry).get("sha256"))
        if size is None or not _FILE.fullmatch(name):
            return None
        files[name] = size, digest
    return Manifest(step, files, raw) if form == FORMAT and tree.get("step") == step and files else None


def remove_checkpoint(store: Store, step: int) -> None:
    """Removes a checkpoint, its manifest first."""
    folder = folder_of(step)
    store.remove(f"{folder}/{MANIFEST}")
    for name, entry in store.names(folder).items():
        if entry is not None:
            store.remove(f"{folder}/{name}")
    store.remove_folder(folder)
