"""What a command found, on standard output: as JSON, as lines, or as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import typer


def show(result: Mapping[str, Any], as_json: bool, text: str | None = None) -> None:
    """Prints what a command found: as JSON, or as `text` says it.

    Without `text` it is one `name: value` a line, what is inside indented under its name.
    """
    if as_json or text is not None:
        typer.echo(json.dumps(result, indent=1, default=str) if as_json else text)
        return
    for name, value in result.items():
        if _is_rows(value):
            typer.echo(f"{name}:")
            _print_table(value)
        else:
            typer.echo("\n".join(_lines({name: value}, "")))


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
    """A result for a reader: the line for each picture is in the JSON and in the run folder only."""
    return {name: value for name, value in plan.items() if name != "files"}


def _is_rows(value: Any) -> bool:
    """A list of mappings with the same keys."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _print_table(rows: list[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int | float) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width to fit
    console.print(table)
