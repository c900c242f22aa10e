"""The curves of a run, from `log.jsonl` as it grows: each line is read once."""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from flame_train.disk.open_folder import OpenFolder
from flame_train.io.json_values import number, table, text
from flame_train.io.runlog import record_of

_NAME: Final = "log.jsonl"
_LONGEST: Final = 1 << 16  # bytes of a line, as `io/runlog.py` has it


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, or over another axis. Values are finite."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: float) -> None:
        """Appends a point."""
        self.steps.append(step)
        self.values.append(value)

    def copy(self) -> Curve:
        """Returns the curve as it is now."""
        return Curve(self.steps[:], self.values[:])

    def __len__(self) -> int:
        return len(self.steps)

    def since(self, step: float) -> Curve:
        """Returns the points from a step on; steps rise."""
        first = bisect.bisect_left(self.steps, step)
        return Curve(self.steps[first:], self.values[first:]) if first else self

    def smoothed(self, weight: float) -> Curve:
        """Computes the exponential mean in which a value keeps `weight` of the mean before it, as `Meter` does."""
        means = accumulate(self.values, lambda mean, value: weight * mean + (1.0 - weight) * value)
        return Curve(self.steps, array("d", means))

    def thinned(self, most: int) -> Curve:
        """Returns at most about `most` points: of each stretch the lowest and the highest, so that no peak is lost."""
        if len(self) <= most:
            return self
        parts = max(most // 2, 1)
        thin, stretch = Curve(), len(self) / parts
        for part in range(parts):
            some = range(int(part * stretch), min(int((part + 1) * stretch), len(self)))
            low, high = min(some, key=self.values.__getitem__), max(some, key=self.values.__getitem__)
            for i in dict.fromkeys((min(low, high), max(low, high))):
                thin.add(self.steps[i], self.values[i])
        if thin.steps[-1] != self.steps[-1]:
            thin.add(self.steps[-1], self.values[-1])
        return thin

    def every(self, most: int) -> Curve:
        """Returns at most about `most` points, evenly spaced, the last among them: for a curve without peaks."""
        if len(self) <= most:
            return self
        stride = math.ceil(len(self) / most)
        last = array("d") if (len(self) - 1) % stride == 0 else self.steps[-1:]
        return Curve(self.steps[::stride] + last, self.values[::stride] + (self.values[-1:] if last else last))


class LogCurves:
    """The curves of one log, by name: "loss", "validation/loss", "bands/0-50". `read` takes the lines that are new."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.last: Mapping[str, Any] = {}
        self._offset = 0
        self._line = b""  # the last that was read: where it is not there any more, the log was cut

    def read(self, folder: OpenFolder) -> None:
        """Takes the new lines of the log in `folder`; all of them if it was cut back. Raises OSError."""
        with folder.reading(_NAME) as file:
            file.seek(self._offset - len(self._line))
            if file.read(len(self._line)) != self._line:
                self.curves, self.last, self._offset, self._line = {}, {}, 0, b""
            file.seek(self._offset)
            while (line := file.readline(_LONGEST)).endswith(b"\n") and (record := record_of(line)):
                self._offset, self._line = self._offset + len(line), line
                self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        self.last = record
        for name, value in _numbers(record):
            self.curves.setdefault(name, Curve()).add(record["step"], value)


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the finite numbers of a line: its own, and those of a validation and of bands of noise levels."""
    tables = [("", record)]
    validation, images = (table(record.get(name)) for name in ("validation", "images"))
    tables += [("validation/", {"loss": validation.get("loss")}), ("validation/", table(validation.get("bands")))]
    tables += [("bands/", table(images.get("bands")))]
    for prefix, values in tables:
        for name, value in values.items():
            if (finite := number(value)) is not None:
                yield prefix + text(name), finite
