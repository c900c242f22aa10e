"""Prints a command's result as JSON, lines or tables on standard output, and errors on standard error."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import Any, Final

import typer

from flame_train.disk.system import optional_module
from flame_train.errors import (
    EnvironmentFault,
    FlameError,
    Interrupted,
    OtherRankFailed,
    exit_status,
    is_device_failure,
    is_out_of_memory,
    lines_shown,
    of_environment,
    shown,
    without_memory,
)
from flame_train.version import __version__

_ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR  # the bits of the access mode


def open_streams() -> None:
    """Put the null device where whoever started the program has closed its standard streams.

    The next file that is opened gets the lowest free number; as number 2 a run's lock would be written into.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes this number: all lower ones are in use
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open to the end


def could_show() -> None:
    """Raises EnvironmentFault where standard output is open for reading only: a result would be lost at the end."""
    fcntl = optional_module("fcntl")
    if fcntl is None:
        return  # Windows says of no stream how it was opened
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not a descriptor's
        mode = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL) & _ACCESS
        if mode == os.O_RDONLY:
            raise EnvironmentFault("standard output is open for reading only; start again with one that can be written")


_STYLES: Final = {
    "error:": "bold red",
    "ok ": "green",
    "missing ": "yellow",
    "low ": "yellow",
    "bad ": "red",
    "Fits ": "bold green",
    "Does not fit ": "bold red",
}
"""How a line's beginning is drawn on a terminal."""


def _print(text: str, err: bool = False) -> None:
    """Prints lines; on a terminal their beginnings have colours, unless NO_COLOR is set (https://no-color.org)."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        typer.echo(text, err=err)
        return
    from rich.console import Console
    from rich.text import Text

    drawn = Text()
    for line in text.split("\n"):
        label = next((words for words in _STYLES if line.startswith(words)), "")
        drawn.append(label, _STYLES.get(label)).append(f"{line.removeprefix(label)}\n")
    Console(file=stream, highlight=False).print(drawn, end="", soft_wrap=True)


def show(result: Mapping[str, Any], as_json: bool, text: str | None = None) -> None:
    """Prints a command's result, as JSON or as `text`.

    Without `text` it prints one `name: value` a line, with nested values indented.
    """
    if as_json:
        typer.echo(json.dumps(_strict(result), indent=1, default=str, allow_nan=False))
        return
    if text is not None:
        _print(lines_shown(text))
        return
    for name, value in result.items():
        if _is_rows(value):
            typer.echo(f"{name}:")
            _print_table(value)
        else:
            typer.echo(lines_shown("\n".join(_lines({name: value}, ""))))


def _strict(value: Any) -> Any:
    """Puts null for NaN and infinity, which JSON has not; as names, their words."""
    if isinstance(value, Mapping):
        unsaid = {name: str(name) for name in value if isinstance(name, float) and not math.isfinite(name)}
        return {unsaid.get(name, name): _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(table: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{name}:", *_lines(value, indent + "  ")]
        elif isinstance(value, list | tuple) and value:
            lines.append(f"{indent}{name}:")
            lines += [f"{indent}  {item}" for item in value]
        else:
            lines.append(f"{indent}{name}: {'none' if value in (None, (), [], {}) else value}")
    return lines


def without_files(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a result for a reader: the line for each image is in the JSON and in the run folder only."""
    return {name: value for name, value in plan.items() if name != "files"}


def _is_rows(value: Any) -> bool:
    """Tells whether it is a list of mappings."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else shown(value)


def _print_table(rows: list[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    first = {name: value for row in reversed(rows) for name, value in row.items()}
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="right" if isinstance(first[name], int | float) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width to fit
    console.print(table)


def print_exception(error: Exception, debug: bool) -> int:
    """Tell the user about `error` in their terms. Returns the exit code."""
    complaint: Any = error if hasattr(error, "format_message") else None  # the parser's own, about the command line
    if complaint is not None:
        if complaint.format_message():
            print_error(_of_usage(complaint))
        else:  # a group without a command, whose help is the answer
            complaint.show()
        return 2
    status = exit_status(error)
    if isinstance(error, OtherRankFailed) and error.quiet:
        return status
    if isinstance(error, Interrupted):  # asked for, so no error
        tell(str(error))
    elif isinstance(error, FlameError):
        print_error(str(error))
    elif is_out_of_memory(error):
        print_error(without_memory(error, "try data.batch_size=1, gradient.checkpointing=true, a lower rank"))
    elif is_device_failure(error):
        again = (
            "start again: a run continues from its last checkpoint; if it comes back, it may be a bug in flame-train"
        )
        print_error(f"the GPU failed: {error}; {again}{'' if debug else _saved_trace()}")
    elif refused := of_environment(error):
        print_error(f"{refused}; look at this machine's limits (ulimit -a) and libraries (flame-train doctor)")
    elif isinstance(error, OSError) and status != 1:
        print_error(f"{error.filename or 'output'}: the disk is full; free some space and start again")
    else:
        print_error(f"this is a bug in flame-train: {type(error).__name__}: {error}{'' if debug else _saved_trace()}")
    return status


_PARSERS_WORDS: Final[dict[str, Any]] = {
    r"Invalid value: ": "",
    r"^Invalid value for '(?:-\w / )?([^' ]+)[^']*':": r"\1:",
    r"Value error, ": "",
    r"^Option '([^']+)' requires": r"\1: requires",
    r"argument\(s\) \((.*)\)": r"argument \1",
    r"Input should be a valid integer, .*": "expected a whole number",
    r"Input should be a valid number, .*": "expected a number",
    r"Input should be (greater|less) than or equal to (\S+)": r"expected a number \1 than or equal to \2",
    r"^(Missing|No such|Got)": lambda found: found[0].lower(),
}
"""What the parser says, and how it reads here."""


def _of_usage(error: Any) -> str:
    """Returns the parser's complaint in the shape of all others, with the command that lists the options."""
    text = " ".join(error.format_message().split()).rstrip(".")
    for theirs, ours in _PARSERS_WORDS.items():
        text = re.sub(theirs, ours, text)
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "flame-train"
    return f"{text}; see {command} --help"


def print_error(message: str) -> None:
    """Prints one line about what went wrong."""
    tell(f"error: {message}")


def tell(message: str) -> None:
    """Prints one line on standard error."""
    with contextlib.suppress(OSError):  # the terminal was closed: the exit status still reports
        _print(lines_shown(message), err=True)


class Printable(logging.Formatter):
    """A formatter of log lines that escapes control characters, so that no file controls the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        return lines_shown(super().format(record))


def _saved_trace() -> str:
    """Writes the traceback of the error being handled to a file. Returns where, as the end of a sentence."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="flame-train-bug-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(f"flame-train {__version__}, Python {sys.version}\n{traceback.format_exc()}")
    except OSError:
        return " (run again with --debug for the traceback)"
    return f" (please report it with {file.name})"
