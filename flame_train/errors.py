"""The few errors a user can meet. Each carries the exit code that `cli.py` returns for it.

A message says what was expected, what came, and what to do. Everything that is not one of these is a bug
in flame-train and exits with 1.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final


def kind_of(value: object) -> str:
    """Returns a value's type in a message, with the name of its library if that may not be ours: torch.Tensor."""
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library in ("builtins", "numpy", "flame_train") else f"{library}.{kind.__name__}"


def shown(name: object) -> str:
    """Returns `name` as one printable line: control characters and bytes that are not UTF-8 appear escaped."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def lines_shown(text: str) -> str:
    """Returns `text` with control characters escaped, line ends excepted: no file may control the terminal."""
    return "\n".join(shown(line) for line in text.split("\n"))


def counted(number: int, one: str, several: str = "") -> str:
    """Returns a number with what it counts: 1 image, 2 images; `several` where an s is not enough."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that os.fsdecode could not decode
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


class FlameError(Exception):
    """Base of every error that is not a bug. `exit_code` is the process's exit status."""

    exit_code: ClassVar[int] = 1


class ConfigError(FlameError):
    """Bad usage or configuration: unknown keys, wrong types, impossible values, conflicting options."""

    exit_code = 2


class DataError(FlameError):
    """An image, caption or dataset folder that cannot be used."""

    exit_code = 3


class ModelFileError(FlameError):
    """A model or LoRA file that is damaged, of another family, or of a refused format."""

    exit_code = 3


class EnvironmentFault(FlameError):
    """The machine lacks something: driver, library, GPU."""

    exit_code = 4


class DeviceFault(FlameError):
    """The device failed or ran out of memory while working."""

    exit_code = 5


class OutOfMemory(DeviceFault):
    """The host or the GPU had no more memory to give, with what to try in the words of the command that ran."""


class OutputError(FlameError):
    """The output folder cannot be written: full disk, permissions, locked by another run."""

    exit_code = 6


class NonFiniteError(FlameError):
    """Training met a NaN or an infinity and stopped before it reached the weights."""

    exit_code = 7


class RemoteError(FlameError):
    """A store elsewhere cannot be used, or does not have all that this machine has. Nothing is lost here."""

    exit_code = 8


_NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")  # the last: a cluster's warning of the end
STOPPING: Final = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))
"""The signals that stop a run. Windows has the first two."""


class Interrupted(FlameError):
    """A signal asked the program to stop; the checkpoint is saved. 128 + signal number is the exit status."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class _Stop:
    """Is the class of `STOP` alone."""

    def __repr__(self) -> str:
        return "flame_train.STOP"


STOP: Final = _Stop()
"""What a callback returns to end a run after the present step, saved."""


class Stopped(Interrupted):
    """A callback asked the run to stop. `result` is the report of the run as far as it came."""

    def __init__(self, message: str) -> None:
        super().__init__(signal.SIGINT, message)
        self.result: dict[str, Any] = {}


class OtherRankFailed(FlameError):
    """Of processes that train together another one ended, with exit status `code`; `quiet`: others say so."""

    def __init__(self, code: int, message: str, quiet: bool) -> None:
        super().__init__(message)
        self.code, self.quiet = code, quiet

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended it."""
        return self.code > 128


def exit_status(error: BaseException) -> int:
    """Returns the exit status of a program that ends with `error`."""
    if isinstance(error, OtherRankFailed):
        return error.code
    if isinstance(error, Interrupted):
        return 128 + error.signal_number
    if isinstance(error, FlameError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if is_out_of_memory(error) or is_device_failure(error):
        return DeviceFault.exit_code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError.exit_code
    if of_environment(error):
        return EnvironmentFault.exit_code
    return 1


_REFUSED: Final = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.ENAMETOOLONG,
    errno.EIO,
    errno.ESTALE,
    errno.EBADF,
)


def of_environment(error: BaseException) -> str:
    """Returns the resource that the machine refused, for a message; "" for an error of another kind."""
    if isinstance(error, OSError) and error.errno in _REFUSED:
        named = f"{shown(error.filename)}: " if error.filename else ""
        return f"{named}the system refused: {error.strerror}"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "the system refused another thread"
    if isinstance(error, ImportError):
        return f"a library cannot be loaded: {error}"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether the host or the GPU had no more memory to give."""
    kind = type(error)
    on_device = kind.__name__ == "OutOfMemoryError" and kind.__module__.split(".")[0] in ("cupy", "torch")
    refused = _is_of_cuda(error) and str(error).startswith(("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"))
    return isinstance(error, MemoryError | OutOfMemory) or on_device or refused


def is_device_failure(error: BaseException) -> bool:
    """Tells whether the GPU stopped working. Every later call fails too, until a new process starts."""
    return isinstance(error, DeviceFault) or (_is_of_cuda(error) and not is_out_of_memory(error))


def _is_of_cuda(error: BaseException) -> bool:
    """Tells whether CUDA itself said no, in CuPy's words."""
    kind = type(error)
    return kind.__name__ in ("CUDARuntimeError", "CUDADriverError") and kind.__module__.startswith("cupy")


@contextmanager
def out_of_memory(remedy: str) -> Iterator[None]:
    """Raises OutOfMemory with a `remedy` if memory runs out in the body."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(without_memory(error, remedy)) from error


def without_memory(error: BaseException, remedy: str) -> str:
    """Returns the message for memory that ran out. Python's own error says nothing."""
    return f"out of memory: {str(error) or 'no more to be had'}; {remedy}"


class HostRead(RuntimeError):
    """A captured step would read a value back to the host. A programmer's error: exit 1."""


class ShapeError(ValueError):
    """An operation was given shapes, dtypes or attributes it cannot take. A programmer's error: exit 1."""


class Unsupported(NotImplementedError):
    """Something the engine refuses by design, with the reason (second-order gradients, for one)."""
