"""Finds the fastest of several candidates by timing them on the device, and keeps the choices in files."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....disk.atomic_write import write_atomically
from ....disk.preflight import user_cache
from ....errors import OutputError
from .tuning import SM_90, Tuning

_LOG = logging.getLogger(__name__)

_FORMAT = 1  # raised when the meaning of values changes: older files are then simply not found


def default_folder() -> Path | None:
    """Returns `choices` in the user's cache folder; None if the user has no home folder."""
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
        """Returns the file of the value, whether it exists or not; None without a folder."""
        return self.folder and self.folder / hashlib.sha256(self._full_key(key).encode()).hexdigest()[:40]

    def get(self, key: str) -> bytes | None:
        """Returns the value; None if it is not there or damaged, which is logged."""
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


_ROUNDS = 7

_FLUSH_BYTES = 128 << 20  # a fill

_WORTH = 0.97  # of the first candidate's time, which the library suggests: a smaller gain may be noise

_HOPELESS, _CERTAIN_MS = 4, 1.0  # candidates that take this many times the shortest, and this long, are timed only once


class Autotuner:
    """Times work on the device's stream, with caches that hold nothing of a call's operands."""

    def __init__(self, cupy: Any, stream: Any, tuning: Tuning = SM_90) -> None:
        self._flush_seconds = tuning.flush_seconds
        self._cupy, self._stream = cupy, stream

    def fastest(self, candidates: Sequence[Callable[[], None]]) -> int:
        """Returns the index of the fastest; 0 unless another is clearly faster. Waits for the device."""
        if len(candidates) < 2:
            return 0
        times = [statistics.median(t) for t in self._times(candidates)]
        best = min(range(len(candidates)), key=times.__getitem__)
        return best if times[best] < _WORTH * times[0] else 0

    def _times(self, candidates: Sequence[Callable[[], None]]) -> list[list[float]]:
        """Returns each candidate's times in ms; a single one for candidates that are hopelessly slow.

        The candidates take turns, so that a change of the clock rate affects all alike. Fills before each call flush
        the caches. They also keep the device busy for twice as long as the host takes to queue the call's launches.
        Otherwise the host's time would be measured.
        """
        flush = self._cupy.empty(_FLUSH_BYTES, "uint8")
        for candidate in candidates:
            candidate()
        queued, found = [], []
        for candidate in candidates:
            seconds, marks = self._marked(candidate)
            self._stream.synchronize()
            queued.append(seconds)
            found.append([self._cupy.cuda.get_elapsed_time(*marks)])
        limit = max(_CERTAIN_MS, _HOPELESS * min(ms for (ms,) in found))
        hopeful = [i for i, (ms,) in enumerate(found) if ms <= limit]
        turns = []
        for _ in range(_ROUNDS):
            for i in hopeful:
                for _ in range(1 + int(2 * queued[i] / self._flush_seconds)):
                    flush.fill(0)
                turns.append((i, self._marked(candidates[i])[1]))
        self._stream.synchronize()
        for i in hopeful:
            found[i] = [self._cupy.cuda.get_elapsed_time(*marks) for turn, marks in turns if turn == i]
        return found

    def _marked(self, candidate: Callable[[], None]) -> tuple[float, tuple[Any, Any]]:
        """Returns the seconds the host takes to queue `candidate`, and events before and after it."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self._stream)
        start = time.perf_counter()
        candidate()
        seconds = time.perf_counter() - start
        end.record(self._stream)
        return seconds, (begin, end)
