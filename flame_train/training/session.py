"""What every stage of a run is given: where it works, with whom, what stops it, and the functions that hear of it.

Functions of the caller may look, and change no trained bit.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, Final, Self

from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.errors import STOP, STOPPING, Interrupted, Stopped, kind_of

_BY_CALLBACK: Final = 1000
"""Stands in the place of a signal's number where a callback stops a run: above that of any signal."""


class StopRequest:
    """While entered, the first signal sets `signal_number` and is said to be heard; a second one ends the process.

    Work in many small parts (caching, sampling) calls `check()` between them. The training loop reads `requested` at
    the end of a step, saves, and then calls `check()`. A signal that is ignored from outside, as `nohup` does with
    SIGHUP and a shell with a background job's SIGINT, stays ignored.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self.error: BaseException | None = None
        """What a callback raised: the run saves, and raises it again."""
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a signal came, or a callback asked for the end."""
        return self.signal_number != 0

    def ask(self, error: BaseException | None = None) -> None:
        """Stops the run as a signal does, for a callback that returned `STOP` or raised an error."""
        self.error = self.error or error
        self.signal_number = self.signal_number or _BY_CALLBACK

    def check(self, where: str) -> None:
        """Raises `Interrupted` if a signal came, `Stopped` for a callback. `where` ends the sentence "stopped ..."."""
        if self.signal_number == _BY_CALLBACK:
            raise Stopped(f"stopped {where}")
        if self.requested:
            raise Interrupted(self.signal_number, f"stopped {where}")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            signals = [s for s in STOPPING if signal.getsignal(s) is not signal.SIG_IGN]
            self._previous = {s: signal.signal(s, self._note) for s in signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            _say("stopped at once: unsaved work is lost")
            os._exit(128 + number)
        self.signal_number = number
        name = signal.Signals(number).name  # it is said, for a step or a download may take minutes
        _say(f"{name}: stopping as soon as no work is lost; a second signal stops at once")


def _say(text: str) -> None:
    """Writes a line on standard error, past Python's buffers, which a handler may find in use."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions that a run calls in its own thread; None: nobody listens.

    Args:
        on_step: gets each line of `log.jsonl`, as a read-only mapping, one step late: the device works on meanwhile.
        on_checkpoint: gets the step and the folder of a checkpoint that is on the disk.
        on_sample: gets the step and the file of a sample grid that is on the disk.

    A function that returns `STOP` ends the run after the present step, saved. So does one that raises an exception,
    which the run then raises again. Raises TypeError for what cannot be called with these arguments.
    """

    on_step: Callable[[Mapping[str, Any]], object] | None = None
    on_checkpoint: Callable[[int, Path], object] | None = None
    on_sample: Callable[[int, Path], object] | None = None

    def __post_init__(self) -> None:
        _check_takes(self.on_step, "on_step", "the step's record, a mapping")
        _check_takes(self.on_checkpoint, "on_checkpoint", "the step", "the checkpoint's folder")
        _check_takes(self.on_sample, "on_sample", "the step", "the sample grid's file")

    def heeded(self, stop: StopRequest) -> Callbacks:
        """Returns the same functions, where one that returns `STOP` or raises an exception asks `stop`."""
        return Callbacks(*(_heeded(fn, stop) for fn in (self.on_step, self.on_checkpoint, self.on_sample)))

    def step(self, record: Mapping[str, Any]) -> None:
        """Tells of a step's figures."""
        if self.on_step is not None:
            self.on_step(MappingProxyType(dict(record)))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Tells of a checkpoint."""
        if self.on_checkpoint is not None:
            self.on_checkpoint(step, folder)

    def sample(self, step: int, file: Path) -> None:
        """Tells of a sample grid, if it was written."""
        if self.on_sample is not None and file.exists():
            self.on_sample(step, file)


def _heeded(fn: Callable[..., object] | None, stop: StopRequest) -> Callable[..., object] | None:
    if fn is None:
        return None

    def call(*arguments: object) -> None:
        if stop.error is not None:
            return
        try:
            if fn(*arguments) is STOP:
                stop.ask()
        except BaseException as error:
            stop.ask(error)

    return call


def _check_takes(fn: object, name: str, *arguments: str) -> None:
    """Raises TypeError unless `fn` is None or can be called with one value for each of the `arguments`."""
    expected = f"{name}: expected a function of {len(arguments)}: {', '.join(arguments)}"
    if fn is None:
        return
    if not callable(fn):
        raise TypeError(f"{expected}; got {kind_of(fn)}")
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError as e:
        raise TypeError(f"{expected}; the one given cannot be called so: {e}") from None
    except ValueError:  # some functions written in C say nothing of what they take
        return


SILENT: Final = Callbacks()
"""Nobody listens."""


@dataclass(frozen=True, slots=True)
class Session:
    """One process's part in a run, from its first stage to its last.

    Attributes:
        device: "cuda", "cuda:1" and so on, or "cpu".
        group: the processes that train together.
        stop: raises Interrupted after a signal.
        callbacks: hears of steps, checkpoints and samples.
        accept_changed_code: whether a run goes on although a script's code for it has changed.
        quiet: whether nothing shows how far it is.
    """

    device: str
    group: ProcessGroup = ALONE
    stop: StopRequest = field(default_factory=StopRequest)
    callbacks: Callbacks = SILENT
    accept_changed_code: bool = False
    quiet: bool = False
