"""Streams and events that keep what is queued, and tell what is certain to be done before something begins."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class Line:
    """A stream that keeps the order of what is queued on it."""

    current: Line

    def __init__(self, non_blocking: bool = False) -> None:
        self.queued = list[Any]()

    @property
    def ptr(self) -> Line:
        return self

    def use(self) -> None:
        Line.current = self

    def wait_event(self, event: Mark) -> None:
        self.queued.append(event.recording)


class Mark:
    """An event; who waits for it waits for its last recording."""

    def __init__(self, disable_timing: bool) -> None: ...

    def record(self, line: Line) -> None:
        self.recording = object()
        line.queued.append(self.recording)


def _copied(to: Any, source: Any, size: int, kind: int, stream: Line) -> None:
    stream.queued.append(f"copy {source} to {to}")


class Cuda:
    """The part of CuPy that is asked."""

    Stream, Event = Line, Mark
    runtime = SimpleNamespace(memcpyAsync=_copied, memcpyHostToDevice=1, memcpyDeviceToHost=2, CUDARuntimeError=OSError)

    @property
    def cuda(self) -> Cuda:
        return self

    def PinnedMemory(self, size: int) -> Any:  # noqa: N802  # CuPy's name
        return SimpleNamespace(ptr=f"host {size}")


def surely_done(lines: Sequence[Line], line: Line, what: str) -> set[str]:
    """All named work of `lines` that is certain to be done when `what`, queued on `line` last, begins."""
    done, ahead = set[Any](), [(line, len(line.queued) - 1 - line.queued[::-1].index(what))]
    while ahead:
        here, end = ahead.pop()
        for item in here.queued[:end]:
            if item not in done:
                done.add(item)
                ahead += [(other, other.queued.index(item)) for other in lines if item in other.queued]
    return {item for item in done if isinstance(item, str)}
