"""Pages of the documentation site that are made from the sources: keys, commands, recipes, settings of other trainers.

Nothing of them is kept in the repository, so none can fall behind. `hooks.py` gives them to MkDocs.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, get_args

import ops
import typer

from flame_train import cli
from flame_train.config.foreign.recognize import PROGRAMS
from flame_train.config.foreign.table import Program, Row
from flame_train.config.keys import Key, keys, sections
from flame_train.config.render import toml_value
from flame_train.tools.init import cards, names, template

ROOT: Final = Path(__file__).parents[2]
REPOSITORY: Final = "https://github.com/flame-train/flame-train/blob/main"
_WIDE: Final = 74  # characters of a line of code that a page shows without scrolling
MODULES: Final = (
    "flame_train",
    "flame_train.errors",
    "flame_train.engine",
    "flame_train.engine.nn",
    "flame_train.engine.optim",
    "flame_train.engine.check",
)
"""The public modules whose names have a page of their own; the ops of `functional` have one together."""


def generated() -> dict[str, str]:
    """Every page that is made, by its address below the site."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "reference/keys.md": keys_page(),
        "reference/commands.md": commands_page(),
        "reference/functional.md": functional_page(),
        "ops.md": ops.page(),
        "op-times.md": op_times_page(),
    }
    pages |= {f"reference/{module}.md": names_page(module) for module in MODULES}
    return pages


def keys_page() -> str:
    """Every key of a config, by section."""
    lines = [
        "# Every key of a config",
        "",
        "`flame-train init FAMILY --full` writes them all into a file. `--set section.key=value` overrides one.",
    ]
    for section, model in sections().items():
        own = [key for key in keys().values() if key.section == section]
        lines += ["", f"## `[{section}]`", "", (model.__doc__ or "").strip().splitlines()[0], ""]
        for key in own:
            lines += [f"### `{key.path}`", "", *_key(key), ""]
    return "\n".join(lines) + "\n"


def _key(key: Key) -> Iterator[str]:
    yield f"{_cell(key.doc[:1].upper() + key.doc[1:])}."
    yield ""
    expected = " | ".join(f"`{choice}`" for choice in key.choices) or key.expected
    yield f"- Expected: {expected}{f', {key.unit}' if key.unit else ''}"
    yield f"- Default: `{toml_value(key.default)}`"
    for choice, default in key.defaults.items():
        if choice and default != key.default:
            yield f"    - with `{key.chosen_by} = {toml_value(choice)}`: `{toml_value(default)}`"
    for path, choices in key.only.items():
        yield f"- Only with `{path}` of {', '.join(f'`{choice}`' for choice in choices)}"
    if key.aka:
        yield f"- Elsewhere: {', '.join(f'`{name}`' for name in key.aka)}"
    if key.free:
        yield "- A continued run may change it."


def commands_page() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(cli.app)
    lines = ["# Every command", "", (root.help or "").strip(), ""]
    for words, command in _commands(root, ("flame-train",)):
        lines += [f"## `{' '.join(words)}`", "", (command.help or "").strip(), ""]
        arguments = [_metavar(p) for p in command.params if p.param_type_name == "argument"]
        lines += ["```", " ".join([*words, *arguments, "[OPTIONS]"]), "```", ""]
        if command.epilog:
            lines += [f"`{command.epilog.removeprefix('Example: ')}`", ""]
        rows = [_parameter(parameter) for parameter in command.params]
        lines += ["| argument or option | means |", "|---|---|", *filter(None, rows), ""]
    return "\n".join(lines)


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*words, name))
        else:
            yield (*words, name), command


def _parameter(parameter: Any) -> str:
    help = _cell(getattr(parameter, "help", None) or "")
    if parameter.param_type_name == "argument":
        return f"| `{_metavar(parameter)}` | {help} |"
    if getattr(parameter, "hidden", False):
        return ""
    value = "" if parameter.is_flag else f" {_metavar(parameter)}"
    said = parameter.default not in (None, False, "", ()) and not callable(parameter.default)
    shown = f" Default: `{parameter.default}`." if said else ""
    spelled = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"| `{spelled}{value}` | {help}{shown} |"


def _metavar(parameter: Any) -> str:
    choices = get_args(parameter.type_descriptor.annotation)
    named = parameter.metavar or ("|".join(map(str, choices)) if choices else parameter.name.upper())
    return str(named)


def presets_and_cards(family: str) -> str:
    """The presets of a family as `init` writes them, and its cards."""
    lines: list[str] = []
    for name in names(family):
        lines += [f"## {name.capitalize()}", "", "```toml", _folded(template(family, name)), "```", ""]
    lines += ["## Cards", "", "`--card GB` writes `memory.budget`, within which [the plan chooses](../memory.md)."]
    rows = cards(family)
    if rows:
        lines[-1] += " From the smallest of these cards on, it writes what was measured:"
        lines += ["", "| GB | keys | measured |", "|---|---|---|"]
    for row in rows:
        own = "<br>".join(f"`{path} = {toml_value(value)}`" for path, value in row["keys"].items())
        lines.append(f"| {row['gb']} | {own} | {_cell(row['source'])} |")
    return "\n".join(lines).rstrip()


def _folded(config: str) -> str:
    """A config for reading: long comments are folded, and stand before the key that they are about."""
    lines: list[str] = []
    for line in config.rstrip().splitlines():
        code, hash_sign, comment = line.partition("#")
        if len(line) > _WIDE and hash_sign:
            folded = textwrap.wrap(comment.strip(), _WIDE - 2, break_on_hyphens=False)
            lines += [f"# {part}" for part in folded]
            line = code.rstrip()
            if not line:
                continue
        lines.append(line)
    return "\n".join(lines)


def settings_table(program_name: str) -> str:
    """Where each setting of another trainer went, from the table that `import` reads."""
    (program,) = (program for program in PROGRAMS if program.name == program_name)
    lines = ["| setting | in flame-train |", "|---|---|"]
    lines += [f"| `{row.key}` | {_counterpart(row, program)} |" for row in _unique(program.table().rows)]
    if program.table().set_rows:
        lines += ["", "Settings of a set of images:", "", "| setting | in `[[data.sets]]` |", "|---|---|"]
        lines += [f"| `{row.key}` | {_counterpart(row, program)} |" for row in _unique(program.table().set_rows)]
    return "\n".join(lines)


def _unique(rows: Iterable[Row]) -> Iterator[Row]:
    """Each row's setting once: rows of several families follow each other."""
    seen = set()
    for row in rows:
        if row.key not in seen:
            seen.add(row.key)
            yield row


def _counterpart(row: Row, program: Program) -> str:
    table = program.table()
    found = [path for other in (*table.rows, *table.set_rows) if other.key == row.key for path in other.to]
    paths = ", ".join(f"`{path.removeprefix('set.')}`" for path in dict.fromkeys(found))
    words = _cell(row.say.removesuffix("; remove it"))
    return paths + (f" ({words})" if paths and words else words) or "read with another setting"


def names_page(module: str) -> str:
    """The public names of a module, which mkdocstrings fills in."""
    public = _public(module)
    lines = [f"# `{module}`", "", f"::: {module}", "    options:", "      members:"]
    return "\n".join([*lines, *(f"        - {name}" for name in public)]) + "\n"


def _public(module: str) -> list[str]:
    """The names in `__all__`; without one those that the module defines."""
    found = importlib.import_module(module)
    if hasattr(found, "__all__"):
        return [name for name in found.__all__ if not name.startswith("__")]
    return [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]


def functional_page() -> str:
    """Every op of `flame_train.engine.functional` with what `help` says of it."""
    from flame_train.engine import functional

    lines = ["# `flame_train.engine.functional`", "", "As `help(F.NAME)` prints it. [Operations](../ops.md) has", ""]
    lines[-2] += " their formulas, dtypes and implementations."
    for name in functional.__all__:
        op = getattr(functional, name)
        text = inspect.getdoc(op) or ""
        lines += [f"## `{name}`", "", "```text", text.replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def op_times_page() -> str:
    """The times of every op beside PyTorch's, as `scripts/op_table.py` measured them."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import op_table

    return "# Operations beside PyTorch\n\n" + op_table.table(json.loads(op_table.MEASURED.read_text(encoding="utf-8")))


def _cell(text: str) -> str:
    """Text for a cell of a table, in which a bar outside of code would begin the next."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else part.replace("|", "\\|").replace("<", "&lt;").replace("[[", "&#91;&#91;")
        for part in parts
    )
