"""Progress of long work on standard error: on a terminal a bar with the time left, elsewhere a line now and then.

All bars share one display, so that bars of several threads, and the lines of the log, do not overwrite each other. A
process whose log says nothing of progress, as all but the first of several that train together, shows none.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

_LOG = logging.getLogger(__name__)
_PLAIN_EVERY_S: Final = 10.0
_SOON_S: Final = 0.5  # shorter work shows nothing
_LEAST_BAR, _WIDEST_BAR = 3, 40  # columns
_GIB: Final = 2**30

_lock = threading.RLock()
_bars: list[Bar] = []
_display: Any = None


class Bar:
    """A line of the display, while there is one; `line` gives what stands before the bar, after it, and how full it is.

    What comes after the bar is in the order of its worth: the last parts go first where a terminal is narrow.
    """

    def __init__(self, line: Callable[[], tuple[str, Sequence[str], float]]) -> None:
        self.line = line
        self._task: Any = None

    def open(self) -> bool:
        """Shows it, if standard error is a terminal: whether it is."""
        global _display
        if sys.stderr is None or not sys.stderr.isatty():
            return False
        with _lock:
            if _display is None:
                _display = _new_display()
                _display.start()
            self._task = _display.add_task("", total=None, bar=self)
            _bars.append(self)
        return True

    def close(self) -> None:
        """Takes it away; the last one leaves the terminal as it was. A terminal that was closed is no error."""
        global _display
        with _lock, contextlib.suppress(OSError):
            if self not in _bars:
                return
            _bars.remove(self)
            if _bars:
                _display.remove_task(self._task)
            else:
                closed, _display = _display, None
                closed.stop()


def _new_display() -> Any:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Column
    from rich.text import Text

    screen = Console(stderr=True)

    class Line(ProgressColumn):
        def render(self, task: Any) -> Text:
            bar: Bar = task.fields["bar"]
            utf8 = screen.encoding.startswith("utf")
            return Text(fitted(*bar.line(), width=screen.width, filled="━" if utf8 else "="), no_wrap=True)

    return Progress(
        Line(table_column=Column(no_wrap=True)),
        console=screen,
        refresh_per_second=4,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )


def fitted(before: str, after: Sequence[str], done: float, *, width: int, filled: str = "━") -> str:
    """A line with a bar, and of what comes after it as many parts as fit.

    Args:
        before: the text before the bar.
        after: the parts after it, in the order of their worth.
        done: the part of the bar that is full, up to 1.
        width: columns that the line may take.
        filled: the character of the full part.

    Returns:
        A line of at most `width` columns.
    """
    kept: list[str] = []
    room = width - 1 - len(before) - 1 - _LEAST_BAR
    for part in filter(None, after):
        if len(part) + 1 > room:
            break
        kept.append(part)
        room -= len(part) + 1
    bar = min(_LEAST_BAR + room, _WIDEST_BAR)
    full = filled * round(bar * min(max(done, 0.0), 1.0))
    return " ".join([before, *([f"{full:<{bar}}"] if bar >= _LEAST_BAR else []), *kept])[:width]


def say(text: str) -> None:
    """A line on standard error, above the bars where there are some. Nobody reading it is no error."""
    with contextlib.suppress(OSError, ValueError):
        with _lock:
            if _display is not None:
                from rich.text import Text

                _display.console.print(Text(text), soft_wrap=True)
                return
        if sys.stderr is not None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


class LogLines(logging.Handler):
    """Writes the log's lines with `say`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            say(self.format(record))
        except Exception:
            self.handleError(record)


class _Work:
    """Work of which so much is done, with its bar or its lines."""

    def __init__(self, what: str, total: float, in_bytes: bool, leaves_line: bool) -> None:
        self._what, self._total, self._in_bytes, self._leaves_line = what, total, in_bytes, leaves_line
        self._done, self._begin = 0.0, time.monotonic()
        self._said = self._begin
        self._bar: Bar | None = None
        self._shown = False

    def advance(self, more: float = 1) -> None:
        """So much more is done."""
        now = time.monotonic()
        with _lock:
            self._done += more
            if self._total and not self._shown and now - self._begin >= _SOON_S and _LOG.isEnabledFor(logging.INFO):
                self._shown, bar = True, Bar(self._line)
                self._bar = bar if bar.open() else None
            plain = self._shown and self._bar is None and now - self._said >= _PLAIN_EVERY_S
            if plain:
                self._said = now
        if plain:
            before, (times, *_), _ = self._line()
            say(f"{before}  {times}")

    def end(self) -> None:
        """Takes the bar away. Work that was shown leaves a line."""
        if self._bar is not None:
            self._bar.close()
        if self._shown and self._leaves_line and self._done >= self._total:
            say(f"{self._what}: {self._count(self._total)} in {clock(time.monotonic() - self._begin)}")

    def _line(self) -> tuple[str, Sequence[str], float]:
        passed, part = time.monotonic() - self._begin, self._done / self._total
        times = elapsed_and_left(passed, passed * (1 / part - 1) if part else None)
        return f"{self._what} {self._count(self._done, of=True)}", [times], part

    def _count(self, done: float, of: bool = False) -> str:
        unit, scale = ("GiB", _GIB) if self._in_bytes else ("", 1)
        digits = ".2f" if self._in_bytes else ".0f"
        total = f"/{self._total / scale:{digits}}" if of else ""
        return f"{done / scale:{digits}}{total} {unit}".strip()


@contextlib.contextmanager
def progress(
    what: str, total: float, in_bytes: bool = False, leaves_line: bool = True
) -> Iterator[Callable[[float], None]]:
    """Shows how far work `what` is; the block is to say each time how much more of `total` is done.

    Threads may say so at once. Work of less than half a second shows nothing, nor does a `total` of 0. A part of
    larger work, which has a line of its own, leaves none.
    """
    work = _Work(what, total, in_bytes, leaves_line)
    try:
        yield work.advance
    finally:
        work.end()


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}"


def elapsed_and_left(elapsed: float, left: float | None) -> str:
    """As tqdm writes them: 0:01:02<0:10:00."""
    return f"{clock(elapsed)}<{'-:--:--' if left is None else clock(left)}"
