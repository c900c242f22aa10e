"""A cache on disk of answers that are slow to find and depend only on the card and its libraries.

Each answer has a file of its own, named by a hash of its question, so writers never wait for each other: the last
rename wins, with an answer that is as good. A file holds its question and a checksum before the answer. One that is
damaged, or answers another question, is reported, and its answer is found again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from pathlib import Path

_LOG = logging.getLogger(__name__)
_FORMAT = 1  # raised when the meaning of answers changes: older files are then simply not found


def default_folder() -> Path | None:
    """`flame-train/choices` in XDG_CACHE_HOME or ~/.cache; None if the user has no home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # a container's user without HOME or an entry in the system's table of users
        return None
    return base / "flame-train" / "choices"


class Shelf:
    """The answers in `folder`, which is made when the first is written, for the card that `place` describes.

    Without a folder nothing is kept, which is logged at the first write.
    """

    def __init__(self, folder: Path | None, place: str) -> None:
        self.folder, self._place = folder, place
        self._writable = True
        self._held: set[Path] = set()  # paths taken by something that a file cannot replace, such as a folder

    def path(self, question: str) -> Path | None:
        """The file of the answer, whether it exists or not; None without a folder."""
        return self.folder and self.folder / hashlib.sha256(self._whole(question).encode()).hexdigest()[:40]

    def get(self, question: str) -> bytes | None:
        """The answer; None if it is not there or damaged, which is logged."""
        path = self.path(question)
        if path is None:
            return None
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.warning("%s: cannot be read (%s); what it holds is found anew", path, error)
            return None
        head, _, answer = content.partition(b"\n")
        if head != self._head(question, answer):
            _LOG.warning("%s: damaged; what it held is found anew", path)
            return None
        return answer

    def put(self, question: str, answer: bytes) -> None:
        """Writes an answer, replacing an earlier one. If the folder cannot be written that is logged once."""
        path = self.path(question)
        if not self._writable or path in self._held:
            return
        if path is None:
            self._give_up("~/.cache", "this user has no home folder; set XDG_CACHE_HOME")
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(self._head(question, answer) + b"\n" + answer)
            self._replace(temporary, path)
        except OSError as error:
            self._give_up(f"{path.parent}", f"{error}")
        finally:
            with contextlib.suppress(OSError):  # gone already after the rename
                temporary.unlink(missing_ok=True)

    def _replace(self, temporary: Path, path: Path) -> None:
        """Renames. A failure concerns this entry alone, such as a folder of that name, so others are still written."""
        try:
            os.replace(temporary, path)
        except OSError as error:
            self._held.add(path)
            _LOG.warning("%s: cannot be replaced (%s); each run finds what it should hold anew", path, error)

    def _give_up(self, where: str, why: str) -> None:
        self._writable = False
        _LOG.warning("%s: nothing can be kept there (%s); each run finds it anew", where, why)

    def _whole(self, question: str) -> str:
        return json.dumps([_FORMAT, self._place, question])

    def _head(self, question: str, answer: bytes) -> bytes:
        return f"{hashlib.sha256(answer).hexdigest()} {self._whole(question)}".encode()
