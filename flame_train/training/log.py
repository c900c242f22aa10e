"""The output of a run: a progress bar or plain lines, and TensorBoard. None of it can end the run."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_LOG = logging.getLogger(__name__)
_PLAIN_EVERY_S = 10.0
_FLUSHED_EVERY_S = 10.0  # TensorBoard's file: it waits for the disk
_SMOOTHING = 0.95
_MUCH = 0.1  # of a step's time, spent waiting for data
_TIME_LEFT, _FIGURES, _BAR = 7, 74, 40  # columns of a terminal; the bar gets what is left, then figures are cut short


class Console:
    """A progress bar on a terminal; elsewhere a line now and then. All of it goes to standard error."""

    def __init__(self, total: int, start: int, epochs: float = 0.0, silent: bool = False) -> None:
        """A display of steps `start` to `total`, which are `epochs` epochs; 0: epochs are not shown.

        `silent` shows nothing: another process does.
        """
        self._total, self._start, self._epochs, self._silent = total, start, epochs, silent
        self._begin: float | None = None  # of the first step; a sample grid before it does not count
        self._last_line = 0.0
        self._smooth: float | None = None
        self._blocks = ""  # the gradient norms of blocks when they were last read
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr is not None and sys.stderr.isatty() and not self._silent:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column

            screen, count = RichConsole(stderr=True), 2 * len(str(self._total)) + 1
            room = screen.width - count - _TIME_LEFT - _FIGURES
            self._bar = Progress(
                MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=count)),
                *([BarColumn(min(room, _BAR))] if room > 0 else []),
                TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=_TIME_LEFT)),
                TextColumn("{task.fields[figures]}"),
                console=screen,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._start, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def show(self, record: Mapping[str, Any], seconds: float) -> None:
        """The figures of one step, which took so long."""
        if self._silent:
            return
        if "gradients" in record:
            self._blocks = _extremes(record["gradients"])
        text = (
            f"{self._epoch(record)}mean loss {self._smoothed(float(record['loss'])):.4g}  lr {record['lr']:.2e}  "
            f"|g| {record['grad_norm']:.3g}{self._blocks}  {record['images_per_s']:.2f} img/s"
        )
        if record["memory"] is not None:
            text += f"  {record['memory'] / 2**30:.1f} GiB"
        if record["data_wait_ms"] > _MUCH * 1e3 * seconds:
            text += f"  waits {record['data_wait_ms']:.0f} ms for data"
        with contextlib.suppress(OSError):  # a terminal that was closed, a pipe nobody reads any more
            self._show(record, text, seconds)

    def _epoch(self, record: Mapping[str, Any]) -> str:
        return f"epoch {record['epoch']:.2f}/{self._epochs:.2f}  " if self._epochs else ""

    def _smoothed(self, loss: float) -> float:
        """A running mean, over which an overflow in fp16 passes without a trace."""
        if self._smooth is None or not math.isfinite(self._smooth):
            self._smooth = loss
        elif math.isfinite(loss):
            self._smooth = _SMOOTHING * self._smooth + (1 - _SMOOTHING) * loss
        return self._smooth

    def _show(self, record: Mapping[str, Any], text: str, seconds: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], figures=text)
            return
        now = time.monotonic()
        if self._begin is None:
            self._begin = now - seconds
        if record["step"] in (self._start + 1, self._total) or now - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = now
            done = max(record["step"] - self._start, 1)
            left = (now - self._begin) / done * (self._total - record["step"])
            print(f"step {record['step']}/{self._total}  {text}  ETA {_clock(left)}", file=sys.stderr)  # noqa: T201


def _extremes(norms: Mapping[str, float]) -> str:
    """The blocks with the least and the largest gradient; NaN counts as the largest."""
    in_order = sorted(norms, key=lambda block: (math.isnan(norms[block]), norms[block]))
    return " (" + ", ".join(f"{norms[b]:.3g} {b}" for b in dict.fromkeys((in_order[0], in_order[-1]))) + ")"


def _clock(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}"


class TensorBoard:
    """TensorBoard's event files, if the config wants them. A writer that fails is given up with one warning.

    `done` is the last step before the run continues; it supersedes later events of earlier processes. It writes
    events at once. tensorboardX's own SummaryWriter writes on a thread, which a full disk ends, and then waits for it
    forever.
    """

    def __init__(self, folder: Path | None, done: int) -> None:
        self._writer: Any = None
        self._flushed = -math.inf
        if folder is None:
            return
        try:
            self._writer = _events(folder, done + 1)
        except ImportError:
            _LOG.warning("TensorBoard events are not written: pip install 'flame-train[tensorboard]'")
        except Exception as e:  # besides the disk's errors: a protobuf of another version raises others
            _LOG.warning("TensorBoard events are not written: %s", e)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._attempt(lambda: self._writer.close())

    def write(self, record: Mapping[str, Any]) -> None:
        """A point on each curve."""
        self._attempt(lambda: self._add(record))

    def _add(self, record: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        curves = ("loss", "lr", "grad_norm", "loss_scale", "images_per_s")
        values = {name: record[name] for name in curves}
        values |= {f"gradients/{block}": norm for block, norm in record.get("gradients", {}).items()}
        if "validation" in record:
            measured = record["validation"]
            values["validation/loss"] = measured["loss"]
            values |= {f"validation/{band}": loss for band, loss in measured["bands"].items()}
        points = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        event = Event(wall_time=time.time(), step=record["step"], summary=Summary(value=points))
        self._writer.write(event.SerializeToString())
        now = time.monotonic()
        if now - self._flushed >= _FLUSHED_EVERY_S:
            self._flushed = now
            self._writer.flush()

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._writer is None:
            return
        try:
            work()
        except Exception as e:
            _LOG.warning("TensorBoard events are no longer written: %s", e)
            writer, self._writer = self._writer, None
            with contextlib.suppress(Exception):  # it writes once more the bytes that the disk has refused
                writer.close()


def _events(folder: Path, first: int) -> Any:
    """A new event file, by which TensorBoard drops the old events from step `first` on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    now, begin = time.time(), SessionLog(status=SessionLog.START)
    writer = RecordWriter(str(folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}"))
    for event in (
        Event(wall_time=now, file_version="brain.Event:2"),
        Event(wall_time=now, step=first, session_log=begin),
    ):
        writer.write(event.SerializeToString())
    return writer
