"""Images, checkpoints and LoRAs from addresses: fetched once into the cache, and again where the store has others.

A record says of each file its size and version there, and its SHA-256. A file that is not as recorded is fetched anew.
S3 says an MD5 of most files. Where what came has another, as of files that it encrypts, it must come alike twice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from flame_train.disk.atomic_write import remove, write_atomically
from flame_train.disk.open_folder import FolderEntry, OpenFolder, folder_below
from flame_train.disk.preflight import disk_errors, make_folder, preflight
from flame_train.disk.system import lock
from flame_train.errors import RemoteError, counted
from flame_train.io.addresses import folder_for, local_place
from flame_train.io.digests import Digests
from flame_train.io.json_values import read_checked, write_checked

from .faults import Refused, Unreachable
from .store import Entry, Store

_LOG = logging.getLogger(__name__)

_RECORD: Final = "fetched.json"
_TRIES: Final = 3
_MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')
_POLL: Final = 0.2  # seconds between two looks at a lock that another process has

_Record = dict[str, list[object]]  # name -> size, version and SHA-256


def is_kept(address: str) -> bool:
    """Tells whether it was fetched once, whole. The network is not used."""
    return bool(_read_record(address)) and local_place(address).exists()


def fetch(address: str, digests: Digests, check: Callable[[], None]) -> Path:
    """Fetches what an address names, as it is in the store now, to the cache; returns its path there.

    Args:
        address: of a file or a folder.
        digests: those of files that were hashed before.
        check: called between parts; raises what ends the start.

    Raises:
        RemoteError: there is nothing, or it does not come whole; or the store cannot be asked and not all is here.
        OutputError: the cache has no room for it.
    """
    folder = folder_for(address)
    make_folder(folder, "set XDG_CACHE_HOME to another folder")
    with _alone(folder, check):
        work = _Fetch(address, folder, _read_record(address), digests, check)
        try:
            work.run(Store(address))
        except Unreachable as error:
            if not work.is_whole():
                raise
            _LOG.warning("%s; what was fetched of it before is used", error)
    return local_place(address)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One address, and what was fetched of it."""

    address: str
    folder: Path
    record: _Record
    digests: Digests
    check: Callable[[], None]

    def run(self, store: Store) -> None:
        there = {name: entry for name, entry in store.walk() if not _is_hidden(name)}
        if not there:
            raise Refused(f"{self.address}: there is no file at this address; correct it, or put the files there")
        if strange := next((name for name in there if not _is_safe(name)), None):
            raise Refused(f"{self.address}: {strange!r} is no name for a file here; rename it in the store")
        missing = {name: entry for name, entry in there.items() if not self._has(name, entry)}
        if missing:
            size = sum(entry.size for entry in missing.values())
            _LOG.info("fetching %s, %.1f MiB, from %s", counted(len(missing), "file"), size / 2**20, self.address)
            preflight(self.folder, size, "set XDG_CACHE_HOME to another folder")
        for name, entry in missing.items():
            self.record[name] = [entry.size, entry.version, self._bring(store, name, entry)]
        for name in [name for name in self.record if name not in there]:
            self._remove(name)
            del self.record[name]
        write_checked(self.folder / _RECORD, {"address": self.address, "files": self.record})

    def is_whole(self) -> bool:
        """Tells whether all that was recorded is here, unchanged."""
        return bool(self.record) and all(self._is_unchanged(name) for name in self.record)

    def _has(self, name: str, entry: Entry) -> bool:
        entry_here = self.record.get(name)
        return entry_here is not None and entry_here[:2] == [entry.size, entry.version] and self._is_unchanged(name)

    def _is_unchanged(self, name: str) -> bool:
        path = self._path(name)
        try:
            if path.stat().st_size != self.record[name][0]:
                return False
            return self.digests.of([path], "sha256", lambda: _sha256(path)) == self.record[name][2]
        except OSError:
            return False

    def _path(self, name: str) -> Path:
        place = self.folder / PurePosixPath(self.address.rstrip("/")).name
        return place / name if name else place

    @contextmanager
    def _spot(self, name: str, *, make: bool = False) -> Iterator[FolderEntry]:
        """Opens the place of a file below the folder, which no link leads out of. OutputError where one would."""
        path = self._path(name)
        *folders, last = path.relative_to(self.folder).parts
        with ExitStack() as opened:
            with disk_errors(path):
                folder = opened.enter_context(folder_below(self.folder, *folders, make=make))
            yield folder / last

    def _remove(self, name: str) -> None:
        if self._path(name).exists():
            with self._spot(name) as spot:
                remove(spot)

    def _bring(self, store: Store, name: str, entry: Entry) -> str:
        """Writes one file, and returns its SHA-256."""
        error: RemoteError | None = None
        came = list[str]()
        for _ in range(_TRIES):
            self.check()
            try:
                size, md5, sha256 = self._write(store, name, entry)
            except FileNotFoundError:
                raise Unreachable(f"{self.address}: {name or 'the file'} was listed, and is gone") from None
            except Unreachable as failed:
                error = failed
                continue
            md5_there = _MD5.fullmatch(entry.version)
            if size == entry.size and (md5_there is None or md5_there.group(1) == md5 or sha256 in came):
                return sha256
            came.append(sha256)
            error = Unreachable(f"{self.address}: {name or 'the file'} came with other bytes than the store says")
        self._remove(name)
        assert error is not None
        raise error

    def _write(self, store: Store, name: str, entry: Entry) -> tuple[int, str, str]:
        """Writes what comes, whole or not at all: its size, MD5 and SHA-256."""
        md5, size, sha256 = hashlib.md5(usedforsecurity=False), 0, ""

        def chunks() -> Iterator[bytes]:
            nonlocal size, sha256
            for chunk in store.chunks(name):
                self.check()
                md5.update(chunk)
                size += len(chunk)
                whole.update(chunk)
                yield chunk
            sha256 = whole.hexdigest()

        whole = hashlib.sha256()
        with self._spot(name, make=True) as spot:
            write_atomically(spot, chunks(), entry.size)
        return size, md5.hexdigest(), sha256


def _read_record(address: str) -> _Record:
    content = read_checked(folder_for(address) / _RECORD)
    if not isinstance(content, dict) or content.get("address") != address:
        return {}
    files = content.get("files")
    return files if isinstance(files, dict) else {}


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _is_safe(name: str) -> bool:
    """Tells whether a name of a store is one here, below its folder."""
    parts = name.split("/")
    return name == "" or (all(part not in ("", ".", "..") for part in parts) and "\\" not in name and "\0" not in name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _alone(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Waits while another process fetches the same: of a sweep's runs one does."""
    with disk_errors(folder), OpenFolder.open(folder) as held:
        descriptor = held.file(".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                lock(descriptor)
                break
            except BlockingIOError:
                check()
                time.sleep(_POLL)
        yield
    finally:
        os.close(descriptor)
