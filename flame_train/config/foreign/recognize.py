"""Which trainer a config is of, and reading it with the files that it names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flame_train.config.command_line import SCRIPT, parse_command_line, script_of
from flame_train.config.parse import name_of, parse, read_text
from flame_train.disk.roots import may_look
from flame_train.errors import ConfigError, shown
from flame_train.io.json_values import number

from . import ai_toolkit, diffusion_pipe, eridiffusion, kohya_gui, musubi_tuner, onetrainer, sd_scripts, simpletuner
from .table import Program, Reading, Source

PROGRAMS: Final[tuple[Program, ...]] = (
    ai_toolkit.PROGRAM,
    eridiffusion.PROGRAM,
    simpletuner.PROGRAM,
    onetrainer.PROGRAM,
    diffusion_pipe.PROGRAM,
    kohya_gui.PROGRAM,
    musubi_tuner.PROGRAM,
    sd_scripts.PROGRAM,
)
"""Every program whose configs are known, in the order in which they are tried."""

_PAGE: Final = "docs/conventions.md"
_SCRIPTS: Final = (".sh", ".bat", ".cmd", ".ps1", ".txt")


def program_of(tree: Mapping[str, Any]) -> Program | None:
    """Returns the program that a config with this tree is of; None for our own, and for what nobody wrote."""
    return next((program for program in PROGRAMS if program.is_mine(tree)), None)


def refuse_foreign(tree: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for another trainer's config, with the command that makes one of ours of it."""
    program = program_of(tree)
    if program is not None:
        raise _refusal(program, source)


def foreign_text(text: str, source: str) -> ConfigError | None:
    """Returns the same error for a text in JSON, or for a saved command line; None for anything else."""
    try:
        tree, _ = _parse(text, source)
    except ConfigError:
        return None
    program = program_of(tree)
    return _refusal(program, source) if program is not None else None


def _refusal(program: Program, source: str) -> ConfigError:
    return ConfigError(
        f"{source}: expected a config of flame-train, got one of {program.name}; "
        f"`flame-train import {source} -o my.toml` makes one of ours of it, and {_PAGE} says where settings went"
    )


def read_foreign(source: str, family: str = "") -> tuple[Program, Source]:
    """Returns another trainer's config and the program it is of; `family` holds where the config names none.

    Raises ConfigError for a file that cannot be read, that no program here writes, or that is for another model.
    """
    text = read_text(source)
    tree, lines = _parse(text, source)
    program = program_of(tree)
    if program is None:
        known = ", ".join(dict.fromkeys(program.name for program in PROGRAMS))
        raise ConfigError(f"{name_of(source)}: expected a config of {known}; its keys are of none of them")
    folder = None if source == "-" else Path(source).absolute().parent
    script = str(tree.pop(SCRIPT, "")) if isinstance(tree.get(SCRIPT), str) else ""

    def beside(named: str) -> Reading | None:
        return _beside(named, folder, beside)

    source_read = program.read(Reading(tree, lines, name_of(source), folder, family, script, beside))
    if family and source_read.family and family != source_read.family:
        raise ConfigError(f"{name_of(source)}: --family {family}: this config is for {source_read.family}")
    return program, replace(source_read, family=source_read.family or family)


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Parses TOML, YAML or JSON by the ending; a command line where a script's ending starts a known one."""
    if Path(source).suffix.lower() in _SCRIPTS:
        if script_of(text):
            return parse_command_line(text, name_of(source))
        if other := _ANOTHER.search(text):
            raise ConfigError(
                f"{name_of(source)}: expected a command of sd-scripts or musubi-tuner that trains a LoRA "
                f"(..._train_network.py), got one that starts {other.group(1)}; import the config that it reads, if any"
            )
    tree, lines = parse(text, source)
    _refuse_wild(tree, name_of(source))
    return tree, lines


_ANOTHER: Final = re.compile(
    r"(?ms)^(?![ \t]*#)[^\n=]*\b(?:python\d?|launch|deepspeed|torchrun)\b.{0,400}?\b([\w-]{1,99}\.py)\b"
)
"""A command that starts another script."""


def _refuse_wild(tree: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError for a number that no setting has and that arithmetic would stumble over."""
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(str(below), each) for below, each in value.items()]
        elif isinstance(value, list):
            waiting += [(key, each) for each in value]
        elif type(value) in (int, float) and number(value) is None:
            raise ConfigError(f"{name}: {shown(key)}: expected a number from -1e100 to 1e100")


def _beside(named: str, folder: Path | None, again: Any) -> Reading | None:
    """Finds the file that a config names: below its folder or one above, or of that name beside or above it."""
    path = Path(named.replace("\\", "/")).expanduser()
    places = [path]
    if folder is not None:
        places = [above / path for above in (folder, *folder.parents)]  # an absolute path stays itself
        places += [folder / path.name, folder.parent / path.name]
    for place in places:
        if may_look(place) and place.is_file():
            try:
                tree, lines = _parse(read_text(str(place)), str(place))
            except ConfigError:  # whose text cites a line: any file of this machine may be named
                raise ConfigError(f"{place}: expected a config that can be read, as this one names it") from None
            return Reading(tree, lines, str(place), place.parent, "", "", again)
    return None
