"""A disk cache addressed by content: an entry has the values that would be computed, or is computed again.

A key covers every input of the arrays, so no entry is ever stale: changed input has another key. An entry is one
safetensors file, written whole or not at all. Its metadata holds its key and a checksum. A damaged, truncated or
foreign entry is replaced. A folder in its place is refused, because it may hold anything. Several processes may share a
folder: whoever renames last wins, with the same content.

Who reads an entry's arrays reads and hashes all of it. Who only asks whether it is there need not, where it was found
whole before and was not touched since (`io/digests.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flame_train.disk.atomic_write import remove_stale
from flame_train.disk.open_folder import folder_below
from flame_train.disk.preflight import disk_errors
from flame_train.disk.system import BINARY, NONBLOCK
from flame_train.errors import EnvironmentFault, ModelFileError, OutputError, of_environment
from flame_train.io.digests import Digests
from flame_train.io.dtypes import DTYPE_OF_TAG
from flame_train.io.header import TensorInfo, build_header
from flame_train.io.safetensors import save_file, serialize

_FIRST = 1 << 16  # bytes: a header, and all of a small entry
_KEY = re.compile(r"[0-9a-f]{64}")
_ENDING = ".safetensors"
_PART = re.compile(r"[0-9a-f]{2}")  # the folders that entries lie in
FORMAT = 1  # raised when the meaning of entries changes: older ones are then simply not found

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class UpTo:
    """A dimension that an entry may have any length of, from 1 to `most`."""

    most: int


Shapes = Mapping[str, tuple[int | UpTo, ...]]
_T = TypeVar("_T")


def cache_key(kind: str, content: str, model: str, settings: Mapping[str, Any]) -> str:
    """Returns 64 hex digits over what an entry is, the hash of its input, the hash of the model, and the settings.

    `settings` must be JSON: its order does not matter, every value does.
    """
    return cache_keys(kind, model, settings)(content)


def cache_keys(kind: str, model: str, settings: Mapping[str, Any]) -> Callable[[str], str]:
    """Returns `cache_key` of contents, for many that share all else."""
    before, after = _canonical([FORMAT, kind])[:-1], _canonical([model, settings])[1:]

    def key(content: str) -> str:
        return hashlib.sha256(f"{before},{json.dumps(content)},{after}".encode()).hexdigest()

    return key


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class DiskCache:
    """Entries under `folder`, which is made when the first is written.

    `hits`, `misses` and `damaged` count lookups; a damaged entry counts as a miss too. `digests` remember which entries
    were found whole.
    """

    def __init__(self, folder: Path, digests: Digests | None = None) -> None:
        self.folder, self._digests = folder, digests or Digests(None)
        self._place = os.path.abspath(folder)
        self.hits = self.misses = self.damaged = 0

    def path(self, key: str) -> Path:
        """Returns where the entry of `key` lies, or would."""
        return self.folder / key[:2] / f"{key}{_ENDING}"

    def has(self, key: str, shapes: Shapes | None = None) -> bool:
        """Says whether `get` would give the entry.

        It is read whole, unless the digests know it. Raises what `get` does.
        """
        file = f"{self._place}{os.sep}{key[:2]}{os.sep}{key}{_ENDING}"
        if self._digests.known(file, _question(shapes), self._place) is not None:
            self.hits += 1
            return True
        path = self.path(key)

        def verified() -> str:
            _read_verified(path, key, shapes)
            return "whole"

        return (
            self._looked_up(path, lambda: self._digests.of([path], _question(shapes), verified, self.folder))
            is not None
        )

    def get(self, key: str, shapes: Shapes | None = None) -> Arrays | None:
        """Returns the entry's arrays, copied into memory; None if there is none or it is damaged.

        `shapes` are those that its arrays must have, by name: any others count as damage.
        Raises OutputError where a folder stands in its place, EnvironmentFault where the system refuses to read.
        """
        path, damaged = self.path(key), self.damaged
        arrays = self._looked_up(path, lambda: _read_verified(path, key, shapes))
        if self.damaged > damaged:
            self._digests.forget([path], _question(shapes), self.folder)
        if arrays is None:
            return None
        placed, data = arrays
        return {info.name: _array(info, data) for info in placed}

    def _looked_up(self, path: Path, read: Callable[[], _T]) -> _T | None:
        """Returns what `read` gives of the entry at `path`; None if there is none or it is damaged."""
        try:
            entry = read()
        except FileNotFoundError:
            self.misses += 1
            return None
        except IsADirectoryError:
            raise OutputError(
                f"{path}: is a folder where a cache entry belongs; remove it, or set data.cache to another folder"
            ) from None
        except (ModelFileError, OSError) as error:
            if of_environment(error):
                raise EnvironmentFault(f"{of_environment(error)}; see to that and start again") from error
            self.misses += 1
            self.damaged += 1
            return None
        self.hits += 1
        return entry

    def put(self, key: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Write an entry, replacing any there. Raises OutputError when the disk cannot take it."""
        metadata = {"cache_format": str(FORMAT), "cache_key": key, "cache_sha256": _checksum(arrays)}
        path = self.path(key)
        with ExitStack() as opened:
            with disk_errors(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                part = opened.enter_context(folder_below(self.folder, key[:2], make=True))
            save_file(part / path.name, arrays, metadata)

    def entries(self) -> Iterator[tuple[str, int]]:
        """Yields the key and the bytes of every entry, whole or not; of nothing else that lies there, nor of a link."""
        for part in self._parts():
            with folder_below(self.folder, part) as held:
                for name in held.names():
                    key, found = name.removesuffix(_ENDING), held.lstat(name)
                    ours = name.endswith(_ENDING) and key.startswith(part) and _KEY.fullmatch(key)
                    if ours and found is not None and stat.S_ISREG(found.st_mode):
                        yield key, found.st_size

    def remove(self, key: str) -> None:
        """Remove an entry. Raises OutputError if it cannot be removed."""
        path = self.path(key)
        with disk_errors(path), folder_below(self.folder, key[:2]) as part:
            part.remove(path.name, missing_ok=True)

    def remove_stale(self) -> None:
        """Remove what killed processes left half-written."""
        for part in self._parts():
            with contextlib.suppress(OSError), folder_below(self.folder, part) as held:
                remove_stale(held)

    def _parts(self) -> list[str]:
        """Returns the names of the folders that entries lie in; none without a readable folder."""
        with contextlib.suppress(OSError):
            inside = sorted(os.scandir(self.folder), key=lambda entry: entry.name)
            return [each.name for each in inside if _PART.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
        return []


def _question(shapes: Shapes | None) -> str:
    """Says what the digests are asked about an entry, besides its path, which has its key."""
    return f"cache entry {FORMAT} {None if shapes is None else sorted(shapes.items())}"


_Entry = tuple[list[TensorInfo], memoryview]  # the arrays' places, and the bytes that they lie in


def _read_verified(path: Path, key: str, shapes: Shapes | None) -> _Entry:
    """Reads the entry of `key`; its header is byte for byte what `put` writes. Raises ModelFileError, OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | NONBLOCK | BINARY), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        begin = file.read(_FIRST) if stat.S_ISREG(status.st_mode) else b""
        placed, metadata, length = _header(path, begin)
        total = length + sum(info.nbytes for info in placed)
        if metadata.get("cache_key") != key or metadata.get("cache_format") != str(FORMAT) or total != status.st_size:
            raise ModelFileError(f"{path}: not the cache entry its name says")
        if shapes is not None and not _fit({info.name: info.shape for info in placed}, shapes):
            raise ModelFileError(f"{path}: holds other arrays than {', '.join(shapes)} of the expected shapes")
        whole = begin + file.read(total - len(begin)) if total > len(begin) else begin
    data = memoryview(whole)[length:]
    bare, _ = build_header(placed, {})
    if metadata.get("cache_sha256") != hashlib.sha256(bare + data).hexdigest():
        raise ModelFileError(f"{path}: its content does not match its checksum")
    return placed, data


def _fit(found: Mapping[str, tuple[int, ...]], shapes: Shapes) -> bool:
    return found.keys() == shapes.keys() and all(
        len(found[name]) == len(expected)
        and all(1 <= n <= d.most if isinstance(d, UpTo) else n == d for n, d in zip(found[name], expected, strict=True))
        for name, expected in shapes.items()
    )


def _header(path: Path, begin: bytes) -> tuple[list[TensorInfo], dict[str, str], int]:
    """Places, metadata and length of the header that an entry begins with. Raises ModelFileError."""
    length = 8 + int.from_bytes(begin[:8], "little")
    try:
        fields = json.loads(begin[8:length]) if length <= len(begin) else {}
        metadata = fields.pop("__metadata__")
        infos = [
            TensorInfo(name, f["dtype"], tuple(f["shape"]), f["data_offsets"][1] - f["data_offsets"][0])
            for name, f in fields.items()
        ]
        expected, placed = build_header(infos, metadata)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelFileError(f"{path}: no header of a cache entry ({error})") from None
    if expected != begin[:length] or any(_nbytes(info) != info.nbytes for info in placed):
        raise ModelFileError(f"{path}: no header of a cache entry")
    return placed, metadata, length


def _nbytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * DTYPE_OF_TAG[info.dtype].itemsize


def _array(info: TensorInfo, data: memoryview) -> np.ndarray[Any, Any]:
    dtype = DTYPE_OF_TAG[info.dtype].newbyteorder("<")
    flat = np.frombuffer(data[info.begin : info.begin + info.nbytes], dtype)
    return flat.reshape(info.shape).astype(DTYPE_OF_TAG[info.dtype])


def _checksum(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Returns SHA-256, in hex, over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for chunk in serialize(arrays):
        digest.update(chunk)
    return digest.hexdigest()
