"""Progress of long work on standard error: a bar in a terminal or notebook, elsewhere a line now and then.

tqdm draws the bars, so that those of several threads, and the lines of the log, do not overwrite each other. A
process whose log says nothing of progress, as all but the first of several that train together, shows none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

_LOG = logging.getLogger(__name__)
_PLAIN_EVERY_S: Final = 10.0
_DRAWN_EVERY_S: Final = 0.25  # so that the time passes while a step lasts
_SOON_S: Final = 0.5  # shorter work shows nothing
_MOST_BARS: Final = 20  # a terminal whose height nobody set has 0 rows to tqdm, and no bar
_LEAST_BAR, _WIDEST_BAR = 3, 40  # columns
_GIB: Final = 2**30

_lock = threading.RLock()
_bars: list[Bar] = []
_screen = contextlib.ExitStack()
"""What the last bar undoes: it ends the thread that draws, and gives `print` its terminal back."""


class Bar:
    """A line of the display, while there is one; `line` gives what stands before the bar, after it, and how full it is.

    What comes after the bar is in the order of its worth: the last parts go first where a terminal is narrow.
    """

    def __init__(self, line: Callable[[], tuple[str, Sequence[str], float]]) -> None:
        self.line = line
        self._drawn: Any = None

    def open(self) -> bool:
        """Shows it, if somebody looks at a terminal or a notebook. Returns whether it is shown."""
        if sys.stderr is None or not (sys.stderr.isatty() or _in_kernel()):
            return False
        bars, in_widget = _tqdm()
        with _lock:
            if not _bars:
                _start_drawing()
            file = None if in_widget else sys.stderr if sys.stderr.isatty() else _CellLine()
            self._drawn = bars(total=1, leave=False, nrows=_MOST_BARS, bar_format=" ", file=file)
            _bars.append(self)
            self.draw()
        return True

    def draw(self) -> None:
        """Draws it as the work stands now."""
        before, after, done = self.line()
        width = None if _tqdm()[1] else _columns()
        self._drawn.bar_format = bar_format(before, after, width=width)
        self._drawn.ncols = width
        self._drawn.n = min(max(done, 0.0), 1.0)
        self._drawn.refresh()

    def close(self) -> None:
        """Takes it away; the last one leaves the terminal as it was. A terminal that was closed is no error."""
        with _lock, contextlib.suppress(OSError, ValueError):
            if self not in _bars:
                return
            _bars.remove(self)
            if not _bars:
                _screen.close()
            self.draw()
            self._drawn.close()


@functools.cache
def _tqdm() -> tuple[type[Any], bool]:
    """Returns the class of bars, and whether they are a notebook's widgets. Imported by the first bar."""
    from tqdm import std

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets, where bars are text
        from tqdm.auto import tqdm

    class Line(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # its thread would start a second clock

    Line.set_lock(_lock)
    return Line, tqdm.display is not std.tqdm.display


def _in_kernel() -> bool:
    """Tells whether this process runs the cells of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class _CellLine:
    """A line of a notebook's cell that is written anew, and stands in the saved notebook once: a stream keeps all."""

    encoding = "utf-8"  # by which tqdm chooses the characters of a bar

    def __init__(self) -> None:
        self._shown: Any = None

    def write(self, text: str) -> None:
        """Shows the line in place of the one before."""
        ipython: Any = importlib.import_module("IPython.display")
        line = {"text/plain": text.strip()}
        if self._shown is not None:
            self._shown.update(line, raw=True)
        elif line["text/plain"]:
            self._shown = ipython.display(line, raw=True, display_id=True)

    def flush(self) -> None:
        """Does nothing: what is written is shown."""


def _start_drawing() -> None:
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(_DRAWN_EVERY_S):
            with _lock, contextlib.suppress(OSError, ValueError):
                for bar in _bars:
                    bar.draw()

    threading.Thread(target=draw, name="progress", daemon=True).start()
    _screen.callback(ended.set)
    if sys.stdout is not None and sys.stdout.isatty():
        from tqdm.contrib import DummyTqdmFile

        _screen.enter_context(contextlib.redirect_stdout(DummyTqdmFile(sys.stdout)))


def _columns() -> int:
    with contextlib.suppress(ValueError, OSError):
        return int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def bar_format(before: str, after: Sequence[str], *, width: int | None) -> str:
    """Returns tqdm's format of a line of less than `width` columns: a bar, and as many parts after it as fit.

    Args:
        before: the text before the bar.
        after: the parts after it, in the order of their worth.
        width: columns that the line may take; None where all parts fit, as in a notebook.
    """
    parts = [part for part in after if part]
    if width is None:
        return " ".join([_literal(before), "{bar}", *map(_literal, parts)])
    fitting: list[str] = []
    room = width - 1 - len(before) - 1 - _LEAST_BAR
    for part in parts:
        if len(part) + 1 > room:
            break
        fitting.append(_literal(part))
        room -= len(part) + 1
    columns = min(_LEAST_BAR + room, _WIDEST_BAR)
    bar = [f"{{bar:{columns}}}"] if columns >= _LEAST_BAR else []
    return " ".join([_literal(before[: width - 1]), *bar, *fitting])


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def say(text: str) -> None:
    """Writes a line to standard error, above the bars where there are some. Nobody reading it is no error."""
    with _lock, contextlib.suppress(OSError, ValueError):
        if _bars:
            _tqdm()[0].write(text, file=sys.stderr)
        elif sys.stderr is not None:
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
        """Counts so much more as done."""
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


@contextlib.contextmanager
def quiet(on: bool = True) -> Iterator[None]:
    """Shows no progress within, if `on`."""
    level = _LOG.level
    if on:
        _LOG.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _LOG.setLevel(level)


def clock(seconds: float) -> str:
    """Returns hours, minutes and seconds, as 1:02:03."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}"


def elapsed_and_left(elapsed: float, remaining: float | None) -> str:
    """Writes times as tqdm does: 0:01:02<0:10:00."""
    return f"{clock(elapsed)}<{'-:--:--' if remaining is None else clock(remaining)}"
