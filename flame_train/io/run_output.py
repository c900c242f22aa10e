"""What a run's process says, in a file beside its folder: NAME.output.txt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final

from flame_train.disk.open_folder import OpenFolder
from flame_train.disk.preflight import disk_errors, make_folder
from flame_train.errors import shown

_ENDING: Final = "output.txt"
_TAIL: Final = 1 << 15  # bytes of it that are read
_LONGEST: Final = 2000  # characters of a line
BEGIN: Final = "--- flame-train ui: "
"""What the line before a process's first one begins with."""


def output_of(folder: Path) -> Path:
    """Returns the file with what the process of the run in `folder` said."""
    return folder.with_name(f"{folder.name}.{_ENDING}")


@contextmanager
def saying(output: Path) -> Iterator[IO[bytes]]:
    """Opens the file with what a run says, to append to. Raises OutputError where it is a link, or no plain file."""
    make_folder(output.parent)
    with ExitStack() as opened:
        with disk_errors(output):
            folder = opened.enter_context(OpenFolder.open(output.parent))
            file = opened.enter_context(folder.appending(output.name))
        yield file


def said(folder: Path) -> list[str]:
    """Returns the last lines that the newest process of a run said, each as a terminal shows it."""
    output = output_of(folder)
    try:
        with OpenFolder.open(output.parent) as held:
            text = held.tail(output.name, _TAIL).decode(errors="replace")
    except OSError:
        return []
    lines = text.replace("\r\n", "\n").split("\n")
    begin = max((number for number, line in enumerate(lines) if line.startswith(BEGIN)), default=-1)
    ended = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines[begin + 1 :])  # a bar overwrites itself
    return [shown(line[:_LONGEST]) for line in ended if line]


def why(folder: Path) -> str:
    """Returns the last error that a run said, as one line."""
    return next((line for line in reversed(said(folder)) if line.startswith("error: ")), "")
