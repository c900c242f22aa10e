"""The autotune cache: results on disk that are slow to find and depend only on the GPU and its libraries.

Each value has a file of its own, named by a hash of its key, so writers never wait for each other. The last rename
wins, with a value that is as good. A file holds its key and a checksum before the value. A file that is damaged, or of
another key, is reported, and its value is found again. Files are written as all others are (`disk/atomic_write.py`):
what another user plants there is not followed, and what a killed process left half-written is removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from flame_train.disk.atomic_write import write_atomically
from flame_train.errors import OutputError

from ....user_cache import user_cache

_LOG = logging.getLogger(__name__)
_FORMAT = 1  # raised when the meaning of values changes: older files are then simply not found


def default_folder() -> Path | None:
    """`choices` in the user's cache folder; None if the user has no home folder."""
    return user_cache("choices")


class AutotuneCache:
    """The values in `folder`, which is made when the first is written, for the GPU of `device_fingerprint`.

    Without a folder nothing is stored, which is logged at the first write.
    """

    def __init__(self, folder: Path | None, device_fingerprint: str) -> None:
        self.folder, self._device = folder, device_fingerprint
        self._writable = True
        self._blocked: set[Path] = set()  # paths of something that a file cannot replace, such as a folder

    def path(self, key: str) -> Path | None:
        """The file of the value, whether it exists or not; None without a folder."""
        return self.folder and self.folder / hashlib.sha256(self._full_key(key).encode()).hexdigest()[:40]

    def get(self, key: str) -> bytes | None:
        """The value; None if it is not there or damaged, which is logged."""
        path = self.path(key)
        if path is None:
            return None
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("%s: cannot be read (%s); its value is measured again", path, error)
            return None
        head, _, value = content.partition(b"\n")
        if head != self._head(key, value):
            _LOG.warning("%s: damaged; its value is measured again", path)
            return None
        return value

    def put(self, key: str, value: bytes) -> None:
        """Writes a value, replacing an earlier one. If the folder cannot be written that is logged once."""
        path = self.path(key)
        if not self._writable or path in self._blocked:
            return
        if path is None:
            self._give_up("~/.cache", "this user has no home folder; set XDG_CACHE_HOME")
            return
        content = self._head(key, value) + b"\n" + value
        try:
            write_atomically(path, [content], len(content))
        except OutputError as error:
            if path.is_dir():  # concerns this entry alone, so others are still written
                self._blocked.add(path)
                _LOG.warning("%s: cannot be replaced (%s); each run measures its value again", path, error)
            else:
                self._give_up(f"{path.parent}", f"{error}")

    def _give_up(self, where: str, why: str) -> None:
        self._writable = False
        _LOG.warning("%s: the autotune cache cannot be written there (%s); each run measures again", where, why)

    def _full_key(self, key: str) -> str:
        return json.dumps([_FORMAT, self._device, key])

    def _head(self, key: str, value: bytes) -> bytes:
        return f"{hashlib.sha256(value).hexdigest()} {self._full_key(key)}".encode()
