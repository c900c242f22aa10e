"""A disk cache addressed by content: what is read is what would be computed, or it is computed again.

A key covers everything the arrays depend on, so nothing is ever stale: changed input has another key. An
entry is one safetensors file, written whole or not at all, whose metadata holds its key and a checksum; a
damaged, truncated or foreign one is replaced, and a folder in its place, which may hold anything, is refused.
Modification times play no part. Several processes may share a folder: whoever renames last wins, with the same
content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.errors import ModelFileError, OutputError
from flame_train.io.durable import sweep_path
from flame_train.io.safetensors import SafetensorsFile, save_file, serialize

_PART = re.compile(r"[0-9a-f]{2}")  # the folders that entries lie in
FORMAT = 1  # raised when the meaning of entries changes: older ones are then simply not found

Arrays = dict[str, np.ndarray[Any, Any]]
Shapes = Mapping[str, tuple[int, ...]]


def cache_key(kind: str, content: str, model: str, settings: Mapping[str, Any]) -> str:
    """64 hex digits over what an entry is, the hash of its input, the hash of the model, and the settings.

    `settings` must be JSON: its order does not matter, every value does.
    """
    parts = [FORMAT, kind, content, model, settings]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


class DiskCache:
    """Entries under `folder`, which is made when the first is written.

    `hits`, `misses` and `damaged` count lookups; a damaged entry counts as a miss too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hits = self.misses = self.damaged = 0

    def path(self, key: str) -> Path:
        """Where the entry of `key` lies, or would."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def get(self, key: str, shapes: Shapes | None = None) -> Arrays | None:
        """The entry's arrays, copied into memory; None if there is none or it is damaged.

        `shapes` are those that its arrays must have, by name: any others count as damage.
        Raises OutputError where a folder stands in its place.
        """
        path = self.path(key)
        if os.path.isdir(path):  # False where that cannot be told
            raise OutputError(
                f"{path}: is a folder where a cache entry belongs; remove it, or set data.cache to another folder"
            )
        try:
            if not path.exists():
                self.misses += 1
                return None
            arrays = _read_verified(path, key, shapes)
        except (ModelFileError, OSError):
            self.misses += 1
            self.damaged += 1
            return None
        self.hits += 1
        return arrays

    def put(self, key: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Write an entry, replacing any there. Raises OutputError when the disk cannot take it."""
        metadata = {"cache_format": str(FORMAT), "cache_key": key, "cache_sha256": _checksum(arrays)}
        save_file(self.path(key), arrays, metadata)

    def sweep(self) -> None:
        """Remove what killed processes left half-written."""
        with contextlib.suppress(OSError):
            for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name):
                if _PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    sweep_path(Path(entry.path))

    def get_or_make(self, key: str, make: Callable[[], Mapping[str, np.ndarray[Any, Any]]]) -> Arrays:
        """The entry's arrays; if it is missing or damaged, `make()` is called once and its result kept."""
        found = self.get(key)
        if found is not None:
            return found
        made = dict(make())
        self.put(key, made)
        return made


def _read_verified(path: Path, key: str, shapes: Shapes | None) -> Arrays:
    """Raises ModelFileError for anything but the whole entry of `key`."""
    with SafetensorsFile(path) as file:
        if shapes is not None and file.shapes != dict(shapes):
            raise ModelFileError(f"{path}: holds other arrays than {', '.join(shapes)} of the expected shapes")
        if file.metadata.get("cache_key") != key or file.metadata.get("cache_format") != str(FORMAT):
            raise ModelFileError(f"{path}: not the cache entry its name says")
        arrays = {name: np.array(file.read(name)) for name in file.names}
        if file.metadata.get("cache_sha256") != _checksum(arrays):
            raise ModelFileError(f"{path}: its content does not match its checksum")
    return arrays


def _checksum(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """SHA-256, in hex, over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for chunk in serialize(arrays):
        digest.update(chunk)
    return digest.hexdigest()
