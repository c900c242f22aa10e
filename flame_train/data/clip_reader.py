"""Parts of a clip, of which each frame is decoded once, whichever thread comes first."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import TypeVar

from flame_train.data import clips
from flame_train.data.buckets import Span
from flame_train.data.clips import MAX_CLIP_BYTES, Frame, Pixels
from flame_train.data.file_reading import read_bytes
from flame_train.errors import DataError, shown

_T = TypeVar("_T")


class ClipReader:
    """Reads parts of a clip at one number of frames a second, by one thread at a time.

    What parts that are expected still need is kept of the frames; after the last of them the clip is let go.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        """Takes the file and the hash that it had. Nothing is read yet."""
        self._path, self._sha256, self._lock, self._expected = path, sha256, Lock(), list[int]()
        self._coming: Iterator[Frame] | None = None
        self._kept: dict[int, Frame] = {}  # by their numbers, up to the next one's
        self._next = 0

    def expect(self, span: Span) -> None:
        """Announces a part, which is to be read once. Before any is read."""
        self._expected.append(span.first)

    def part(self, span: Span, seen: Callable[[Pixels], _T]) -> list[_T]:
        """Returns what `seen` makes of the pixels of each of a span's frames, uint8 RGB (H, W, 3).

        Raises DataError if the file is another one now.
        """
        with self._lock:
            if span.first in self._expected:
                self._expected.remove(span.first)
            try:
                found = self._part(span, seen)
            except BaseException:
                self._close()
                raise
            if not self._expected:
                self._close()
            return found

    def _part(self, span: Span, seen: Callable[[Pixels], _T]) -> list[_T]:
        if self._coming is None or span.first < self._next - len(self._kept):
            self._close()
            self._coming = clips.at_times(clips.frames_of(self._data(), shown(self._path)), span.fps)
        needed, found, before = min(self._expected, default=math.inf), list[_T](), None
        for number in range(self._next - len(self._kept), span.first + span.count):
            if number == self._next:
                self._kept[number] = next(self._coming)
                self._next += 1
            frame = self._kept[number] if number >= needed else self._kept.pop(number)
            if number >= span.first:
                found.append(found[-1] if found and frame is before else seen(frame.pixels()))
            before = frame
        return found

    def _close(self) -> None:
        self._coming, self._next = None, 0
        self._kept.clear()

    def _data(self) -> bytes:
        data = read_bytes(self._path, limit=MAX_CLIP_BYTES, name=shown(self._path))
        if hashlib.sha256(data).hexdigest() != self._sha256:
            raise DataError(f"{shown(self._path)}: was changed while the dataset was being read; start again")
        return data
