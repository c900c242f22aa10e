"""`log.jsonl` of a run: a line a step, appended at once. A full disk delays lines and costs none of them."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from flame_train.disk.failpoint import fail_point
from flame_train.disk.open_folder import FolderEntry
from flame_train.io.json_values import json_tree, number, table, whole

_LOG = logging.getLogger(__name__)

_LONGEST = 1 << 16  # bytes of a line; ours have some hundred


class LogFile:
    """The log at a name in a held folder. Raises OSError where it cannot be opened: also where it is a link.

    Lines that the disk has no room for wait in `waiting`, and are written before the next one. So the file always has
    the lines before those that wait, and a checkpoint that takes these along loses none.
    """

    def __init__(self, place: FolderEntry) -> None:
        self._place = place
        self._warned = False
        self.waiting = b""
        self._file = place.folder.appending(place.name)
        self._whole = os.fstat(self._file.fileno()).st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line at once; NaN and infinity, which JSON has not, as null. No room for it costs one warning."""
        self.waiting += json.dumps(_without_nan(record)).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write the lines that wait, if there is room now."""
        if not self.waiting:
            return
        try:
            fail_point("log.append")
            os.ftruncate(self._file.fileno(), self._whole)  # away with what an earlier try left of a line
            if self._file.write(self.waiting) < len(self.waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._warn(error)
        else:
            self._whole += len(self.waiting)
            self.waiting = b""

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _LOG.warning("%s: %s; its lines wait for room", self._place, error.strerror)
            self._warned = True

    def cut(self, step: int, waited: bytes = b"") -> None:
        """Drop every line after `step`, and a last line that was cut short. Raises OSError.

        `waited` are lines that a checkpoint took along: those that are not there are written.
        """
        self._whole, last = 0, 0
        with self._place.folder.reading(self._place.name) as file:
            while line := file.readline(_LONGEST):  # a longer one is none of ours, and may be as long as the disk
                if not line.endswith(b"\n") or step_of(line) > step:
                    break
                self._whole, last = self._whole + len(line), int(step_of(line))
        os.ftruncate(self._file.fileno(), self._whole)
        self.waiting = b"".join(line for line in waited.splitlines(keepends=True) if last < step_of(line) <= step)
        self.write()

    def sync(self) -> None:
        """Wait until the lines are on the disk."""
        self.write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._warn(error)

    def last(self) -> bytes:
        """Returns the last line; empty if there is none. Raises OSError."""
        *_, line = [b"", *self._place.folder.tail(self._place.name, _LONGEST).splitlines()]
        return line

    def losses(self, count: int) -> list[float]:
        """Returns the losses of the last `count` lines, without those that are not finite. Raises OSError."""
        with self._place.folder.reading(self._place.name) as file:
            lines = deque(iter(lambda: file.readline(_LONGEST), b""), count)
        losses = (number(table(json_tree(line)).get("loss")) for line in (*lines, *self.waiting.splitlines()))
        return [loss for loss in losses if loss is not None][-count:]

    def close(self) -> None:
        """Write what waits, if there is room now, and close the file."""
        self.write()
        self._file.close()


def step_of(line: bytes) -> float:
    """Returns the step that a line says; infinity where it is not one that a run wrote: it is cut off from there on."""
    step = record_of(line).get("step", math.inf)
    return cast(float, step)


def record_of(line: bytes) -> Mapping[str, Any]:
    """Returns what a line says; empty where it is not one that a run wrote, with a step."""
    record = table(json_tree(line))
    return record if whole(record.get("step")) is not None else {}


def _without_nan(value: Any) -> Any:
    """Returns the value with None for each number that JSON has not; a mapping's values alike."""
    if isinstance(value, Mapping):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
