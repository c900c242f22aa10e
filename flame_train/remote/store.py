"""Files below an address: read, written, compared and listed, through fsspec.

Every store has whole files at least after a write ends. Where a reader could see half a file meanwhile, as over SFTP,
it is written beside and renamed. Each write is checked: its length, and its hash. Where the store says an MD5 of what
it has, that is compared; elsewhere the file is read back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from flame_train.io.addresses import scheme_of

from .faults import Unreachable, store_errors

BLOCK: Final = 16 << 20  # bytes of a part of an upload
_CHUNK: Final = 1 << 20
_SILENT: Final = 25  # seconds in which a store may send nothing
_TREES: Final = ("file", "local", "sftp", "ssh", "smb", "hdfs", "webdav", "ftp")
_SLOWEST: Final = 20_000  # bytes a second at which a body is sent
_PARTIAL: Final = ".part"
_LEFT: Final = re.compile(r".+\.[0-9a-f]{8}\.part", re.DOTALL)
_SSH: Final = ("sftp", "ssh")


class Readable(Protocol):
    """Bytes to send, a chunk after another; an empty one is the end."""

    def read(self, size: int, /) -> bytes:
        """Returns at most so many bytes."""


class Abandoned(Exception):
    """An upload that is not wanted any more."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a store. `version` changes when its content does, as far as the store can tell."""

    size: int
    version: str


class Store:
    """The files below `address`. Names are relative, with / between parts. Raises RemoteError for what goes wrong."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        scheme = scheme_of(address)
        self._is_tree = scheme in _TREES
        self._is_s3 = scheme in ("s3", "s3a")
        with store_errors(self.address):
            self._fs: Any = _ssh(address) if scheme in _SSH else _opened(address, self._is_s3)
            self._root = str(self._fs._strip_protocol(self.address)).rstrip("/")

    def __str__(self) -> str:
        return self.address

    def names(self, folder: str = "") -> dict[str, Entry | None]:
        """Lists what lies right in a folder: a file's entry, None for a folder. Nothing where there is no folder."""
        path = self._path(folder)
        with store_errors(self.address):
            try:
                self._fs.invalidate_cache()
                listed = self._fs.ls(path, detail=True, **({"refresh": True} if self._is_s3 else {}))
            except (FileNotFoundError, NotADirectoryError):
                return {}
        entries = dict[str, Entry | None]()
        for info in listed:
            name = str(info["name"]).rstrip("/").rpartition("/")[2]
            if str(info["name"]).rstrip("/") != path:
                entries[name] = None if info["type"] == "directory" else _entry(info)
        return entries

    def walk(self) -> Iterator[tuple[str, Entry]]:
        """Yields each file below the address, by its name; a single file, where the address is one, by an empty one."""
        with store_errors(self.address):
            self._fs.invalidate_cache()
            listed = self._fs.find(self._root, detail=True)
        files = {
            str(path)[len(self._root) :].lstrip("/"): _entry(info)
            for path, info in sorted(listed.items())
            if info["type"] == "file" and not str(info["name"]).endswith("/")
        }
        if len(files) > 1:  # an empty name among others is a mark of a folder, as consoles of S3 make
            files.pop("", None)
        yield from files.items()

    def read(self, name: str, limit: int) -> bytes | None:
        """Returns at most `limit` bytes of a file; None where there is none."""
        with store_errors(self.address):
            try:
                with self._opened(name, _CHUNK) as file:
                    return bytes(file.read(limit))
            except FileNotFoundError:
                return None

    def _opened(self, name: str, block: int) -> Any:
        """Opens a file to be read. Raises FileNotFoundError where there is none, or a pipe, which has no end."""
        path = self._path(name)
        if self._is_tree and self._fs.info(path)["type"] != "file":
            raise FileNotFoundError(path)
        return self._fs.open(path, "rb", block_size=block)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the bytes of a file, a chunk at a time. Raises FileNotFoundError."""
        with store_errors(self.address, FileNotFoundError):
            file = self._opened(name, 4 * _CHUNK)
        with file:
            while True:
                with store_errors(self.address, FileNotFoundError):
                    chunk = bytes(file.read(_CHUNK))
                if not chunk:
                    return
                yield chunk

    def download(self, name: str, write: Callable[[bytes], object]) -> str:
        """Gives a file to `write`, a chunk at a time. Returns its SHA-256. Raises FileNotFoundError."""
        digest = hashlib.sha256()
        for chunk in self.chunks(name):
            digest.update(chunk)
            write(chunk)
        return digest.hexdigest()

    def upload(self, name: str, file: Readable, unwanted: Callable[[], bool] = _never) -> str:
        """Writes a file, from where `file` stands to its end, and checks it. Returns the SHA-256 of what was sent.

        Raises:
            Abandoned: `unwanted` said so between two chunks.
            Unreachable: what arrived is not what was sent.
            Full: the store has no room for it.
        """
        path = self._path(name)
        target = f"{path}.{secrets.token_hex(4)}{_PARTIAL}" if self._is_tree else path
        with store_errors(self.address, Abandoned):
            try:
                if self._is_tree:
                    self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                sums = self._send(target, file, unwanted)
                self._check(target, name, sums)
                if self._is_tree:
                    self._fs.mv(target, path)
            except BaseException as error:
                is_full = type(error).__name__ == "SFTPFailure" and self._has_no_room()
                if self._is_tree:
                    with contextlib.suppress(Exception):
                        self._fs.rm_file(target)
                if is_full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
        return sums.sha256.hexdigest()

    def _has_no_room(self) -> bool:
        """Tells whether an SFTP server's disk has no room for a chunk: a write that failed does not say why."""
        from fsspec.asyn import sync

        async def ask(path: str) -> Any:
            async with self._fs._pool.get() as channel:
                return await channel.statvfs(path)

        folder = self._root
        while folder:
            try:
                disk = sync(self._fs.loop, ask, folder)
            except Exception:  # the folder is not there yet, or the server does not tell
                folder = folder.rpartition("/")[0]
                continue
            return bool(disk.bavail * disk.frsize < _CHUNK or (disk.files and not disk.favail))
        return False

    def _send(self, path: str, file: Readable, unwanted: Callable[[], bool]) -> _Sums:
        """Writes `path`. What could not be sent to its end is not made a file, where the store can leave it out."""
        sums = _Sums()
        out = self._fs.open(path, "wb", **({"block_size": BLOCK} if self._is_s3 else {}))
        try:
            while chunk := file.read(_CHUNK):
                if unwanted():
                    raise Abandoned
                sums.add(chunk)
                out.write(chunk)
            out.close()
        except BaseException:
            with contextlib.suppress(Exception):
                out.discard()
            with contextlib.suppress(Exception):
                out.closed = True  # its destructor would send what there is
            with contextlib.suppress(Exception):
                out.close()  # a file of a disk, which keeps its room as long as it is open, removed or not
            raise
        return sums

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, whole or not at all, and checks it."""
        self.upload(name, io.BytesIO(content))

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with store_errors(self.address):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def remove_partial(self, folder: str) -> None:
        """Removes what uploads that were killed have left in a folder."""
        if self._is_tree:
            for name, entry in self.names(folder).items():
                if entry is not None and _LEFT.fullmatch(name):
                    self.remove(f"{folder}/{name}" if folder else name)

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder, in stores that have folders."""
        if self._is_tree:
            with store_errors(self.address):
                try:
                    self._fs.rmdir(self._path(name))
                except (FileNotFoundError, OSError):
                    return

    def modified(self, name: str) -> datetime | None:
        """Returns when a file was written, by the clock of the store; None where there is none."""
        with store_errors(self.address):
            try:
                self._fs.invalidate_cache()
                at = self._fs.modified(self._path(name))
            except FileNotFoundError:
                return None
        return at if at.tzinfo else at.replace(tzinfo=UTC)

    def write_if(self, name: str, content: bytes, version: str | None) -> str | None:
        """Writes a small file only if it has this version; None: only if it does not exist.

        Returns its new version; None if the condition does not hold. Only S3 has this: `has_conditions`.
        """
        bucket, _, key = self._path(name).partition("/")
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        with store_errors(self.address):
            try:
                answer = self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)
            except Exception as error:
                if _is_unmet(error):
                    return None
                raise
        return str(answer["ETag"])

    def read_versioned(self, name: str) -> tuple[bytes, str] | None:
        """Returns a small file and its version, in one request; None where there is none. Only on S3."""
        bucket, _, key = self._path(name).partition("/")
        with store_errors(self.address):
            try:
                answer = self._fs.call_s3("get_object", Bucket=bucket, Key=key)
            except FileNotFoundError:
                return None
            from fsspec.asyn import sync

            return bytes(sync(self._fs.loop, answer["Body"].read)), str(answer["ETag"])

    def has_conditions(self, name: str) -> bool:
        """Tells whether this store refuses a write whose condition does not hold; tried with a file `name`."""
        if not self._is_s3:
            return False
        if self.write_if(name, b"1", None) is None and self.modified(name) is None:
            return False
        return self.write_if(name, b"2", None) is None and self.write_if(name, b"3", '"0"') is None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _check(self, path: str, name: str, sums: _Sums) -> None:
        """Raises Unreachable unless the file that arrived is the one that was sent."""
        self._fs.invalidate_cache()
        info = self._fs.info(path, **({"refresh": True} if self._is_s3 else {}))
        if info["size"] != sums.size:
            raise Unreachable(f"{self.address}: {name} arrived with {info['size']} bytes, {sums.size} were sent")
        if self._is_s3 and str(info.get("ETag", "")).strip('"') == sums.etag():
            return
        digest = hashlib.sha256()
        with self._fs.open(path, "rb", block_size=4 * _CHUNK) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        if digest.digest() != sums.sha256.digest():
            raise Unreachable(f"{self.address}: {name} arrived with other bytes than were sent")


class _Sums:
    """Length and hashes of what was sent, those among them that S3 gives for a whole file and for one in parts."""

    def __init__(self) -> None:
        self.size = 0
        self.sha256 = hashlib.sha256()
        self._parts = [hashlib.md5(usedforsecurity=False)]
        self._in_part = 0

    def add(self, chunk: bytes) -> None:
        """Takes the next bytes, at most as many as a part has."""
        self.size += len(chunk)
        self.sha256.update(chunk)
        room = BLOCK - self._in_part
        for piece in (chunk[:room], chunk[room:]):
            if piece:
                if self._in_part == BLOCK:
                    self._parts.append(hashlib.md5(usedforsecurity=False))
                    self._in_part = 0
                self._parts[-1].update(piece)
                self._in_part += len(piece)

    def etag(self) -> str:
        """Gives what S3 calls the file, without quotes: its MD5, or that of the MD5s of its parts with their number."""
        if self.size < BLOCK:
            return self._parts[0].hexdigest()
        joined = b"".join(part.digest() for part in self._parts)
        return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(self._parts)}"


def _entry(info: dict[str, Any]) -> Entry:
    version = info.get("ETag") or info.get("etag") or info.get("mtime") or info.get("created") or ""
    return Entry(int(info["size"] or 0), str(version))


def _is_unmet(error: BaseException) -> bool:
    """Tells whether a condition of a write did not hold; S3 also says so of two that come at once."""
    each: BaseException | None = error
    while each is not None:
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            return code in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409", "NoSuchKey")
        each = each.__cause__
    return isinstance(error, FileExistsError)


def _opened(address: str, is_s3: bool) -> Any:
    """Opens a file to be read. Raises FileNotFoundError where there is none, or a pipe, which has no end."""
    from fsspec.core import url_to_fs

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would print a traceback for each lost connection
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if is_s3:
        once = {"total_max_attempts": 1, "mode": "standard"}
        limits = {"connect_timeout": 10, "read_timeout": _SILENT, "retries": once}
        options |= {"config_kwargs": limits, "fixed_upload_size": True, "default_fill_cache": False}
    file_system = url_to_fs(address, **options)[0]
    if is_s3:
        file_system.retries = 1  # whoever calls tries again, and says so
        _limit(file_system)
    return file_system


def _limit(file_system: Any) -> None:
    """Bounds each request of an S3 file system: one that waits for leave to send its body has no limit of its own."""
    from fsspec.asyn import sync_wrapper

    request = file_system._call_s3

    async def limited(method: str, *args: Any, **more: Any) -> Any:
        body = more.get("Body", b"")
        seconds = _SILENT + 5 + (len(body) / _SLOWEST if isinstance(body, bytes | bytearray | memoryview) else 0.0)
        return await asyncio.wait_for(request(method, *args, **more), seconds)

    file_system._call_s3 = limited
    file_system.call_s3 = sync_wrapper(limited, obj=file_system)


def _ssh(address: str) -> Any:
    """Opens SFTP by sshfs: hosts' keys are checked and ~/.ssh/config is read, as ssh itself does."""
    from fsspec.utils import infer_storage_options
    from sshfs import SSHFileSystem

    parsed = infer_storage_options(address)
    options = {name: parsed[name] for name in ("port", "username") if parsed.get(name)}
    alive = {"connect_timeout": 15, "keepalive_interval": 10, "keepalive_count_max": 3}
    return SSHFileSystem(parsed["host"], known_hosts=(), skip_instance_cache=True, **alive, **options)
