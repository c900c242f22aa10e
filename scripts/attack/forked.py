"""A command line run in a fork of this process, which has everything imported: killed where it takes too long."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import flame_train.run.commands.stages  # noqa: F401 - what is forked has it
from flame_train import cli
from flame_train.errors import FlameError, exit_status

LONGEST = 60.0  # seconds of one command; HANGS is its code then
HANGS = -signal.SIGALRM

What = Sequence[str] | Callable[[], object]


@dataclass(frozen=True)
class Ended:
    """The exit code, negative for a signal, and what was printed."""

    code: int
    said: str


class Child:
    """A command line, or a call of a function, in a process of its own. `first` is called there before."""

    def __init__(self, what: What, first: Callable[[], object] | None = None) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it ended
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _become(what, first, self._said.fileno())

    def stops(self) -> bool:
        """Waits until it is stopped by a signal, or ended: whether it is stopped."""
        status = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        return status is not None and status.si_code == os.CLD_STOPPED

    def kill(self) -> Ended:
        """Kills it, stopped or not."""
        os.kill(self._pid, signal.SIGKILL)
        return self.end()

    def end(self) -> Ended:
        """Waits for its end."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        with self._said as said:
            said.seek(0)
            return Ended(code, said.read().decode(errors="replace"))


def command(what: What, first: Callable[[], object] | None = None) -> Ended:
    """Runs it to its end."""
    return Child(what, first).end()


def done(what: What) -> None:
    """Runs it to its end. Raises RuntimeError unless that is a good one."""
    ended = command(what)
    if ended.code:
        raise RuntimeError(f"{what} ended with {ended.code}: {ended.said}")


def _become(what: What, first: Callable[[], object] | None, said: int) -> NoReturn:
    """The child."""
    code = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, LONGEST)  # SIGALRM's default ends the process
        for number in (1, 2):
            os.dup2(said, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if first is not None:
            first()
        if callable(what):
            what()
            code = 0
        else:
            sys.argv = ["flame-train", *what]
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except FlameError as error:
        print(error)
        code = exit_status(error)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
