"""`flame-train import`: another trainer's config as one of ours, and a list of what has no counterpart."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flame_train.config.conversion import Conversion, convert
from flame_train.config.foreign.recognize import read_foreign
from flame_train.config.foreign.table import Program, Source
from flame_train.config.keys import keys, sections
from flame_train.config.render import comment, toml_value
from flame_train.config.schema import FORMAT
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import refuse_place
from flame_train.disk.roots import may_look
from flame_train.errors import ConfigError, ModelFileError
from flame_train.models.registry import FAMILIES, family_of

_COLUMN = 44


def import_config(
    source: str, output: Path | None, family: str = "", force: bool = False, partial: bool = False
) -> dict[str, Any]:
    """Converts the config in `source` and writes it to `output`, a .toml file.

    Args:
        output: what is written; None: the result alone has it.
        family: the model family, where the config names none.
        partial: whether a file is written though an optimizer, kind of adapter, resolution or length is lost.

    Returns:
        The config, and what became of each setting.

    Raises:
        ConfigError: no known trainer wrote the config, or it is for another model or no LoRA. Without `partial`
            also where something is lost whose default would make another recipe of the rest.
        OutputError: the file cannot be written, or exists without `force`.
    """
    if family and family not in FAMILIES:
        raise ConfigError(f"expected a model family ({', '.join(FAMILIES)}), got {family}")
    program, read = read_foreign(source, family)
    read = replace(read, family=_family_of(program, read, source) or read.family)
    if not read.family and (read.settings or not read.sets):
        raise ConfigError(f"{source}: it does not say which model it is for; add --family {' or '.join(FAMILIES)}")
    lacking = FAMILIES[read.family].unsupported_keys() if read.family else ()
    conversion = convert(program, read, lacking)
    if not partial and conversion.decisive():
        raise ConfigError(_not_whole(conversion, source))
    text = _text(conversion, source)
    if output is not None:
        raw = text.encode()
        refuse_place(output, ".toml", force)
        write_atomically(output, [raw], len(raw))
    return {
        "from": program.name,
        "family": read.family,
        "output": str(output) if output else None,
        "config": text,
        "carried": {
            path: {"value": each.value, "from": each.origin, "settings": list(each.settings)}
            for path, each in conversion.values.items()
        },
        "sets": [{name: each.value for name, each in one.items()} for one in conversion.sets],
        "listed": conversion.lost(),
        "needless": conversion.needless,
        "missing": conversion.missing,
    }


def _family_of(program: Program, read: Source, source: str) -> str:
    """Returns the family of the base model that the config names, if its file is there; else empty."""
    names = [row.key for row in program.table().rows if "model.checkpoint" in row.to]
    folders = {Path(), Path() if source == "-" else Path(source).parent}
    named = [Path(str(read.settings[name].value or ".")).expanduser() for name in names if name in read.settings]
    for path in (folder / name for name in named for folder in folders):
        if may_look(path) and (path.is_file() or (path / "model_index.json").is_file()):
            with contextlib.suppress(ModelFileError):  # what is wrong with it is told when a run is planned
                return family_of(path).name
    return ""


def _not_whole(conversion: Conversion, source: str) -> str:
    first = conversion.decisive()
    others = len(conversion.lost()) - len(first)
    more = f", and {others} more that have no counterpart" if others else ""
    return "\n".join(
        [
            f"{Path(source).name}: expected settings that have a counterpart, got some without that decide the result:",
            *(f"  {each}" for each in first),
            f"`--partial` writes the file all the same, with defaults in their place{more}",
        ]
    )


def as_text(result: dict[str, Any], verbose: bool = False) -> str:
    """Tells in words what was written, what was not, what is still to be set; `verbose`: what needs no key."""
    count = len(result["carried"]) + sum(map(len, result["sets"]))
    lines = [f"{result['from']}: {count} keys carried over, {len(result['needless'])} need none here"]
    if verbose and result["needless"]:
        lines += ["", "need none here:", *(f"  {name}: {why}" for name, why in result["needless"].items())]
    if lost := result["listed"]:
        lines += ["", f"no counterpart ({len(lost)}):", *(f"  {line}" for line in lost)]
    if missing := result["missing"]:
        lines += ["", "still to be set:", *(f"  {line}" for line in missing)]
    if result["output"]:
        written = result["output"]
        lines += ["", f"{written}: check it with `flame-train train {shlex.quote(written)} --dry-run`"]
    else:
        lines = [result["config"].rstrip("\n"), "", *map(comment, "\n".join(lines).split("\n"))]
    return "\n".join(lines)


def _text(conversion: Conversion, source: str) -> str:
    """Writes the config as TOML: each value with where it comes from, then what has no counterpart, as comments."""
    about = f"From {Path(source).name}, a config of {conversion.program}. `flame-train init` writes every key there is."
    lines = [comment(about), "", f"format = {FORMAT}"]
    empty = {problem.partition(":")[0] for problem in conversion.missing}
    for section in sections():
        lines_of = list(_section(conversion, section, empty))
        if lines_of:
            lines += ["", f"[{section}]", *lines_of]
    for one in conversion.sets:
        lines += ["", "[[data.sets]]", *(_line(name, each.value, each.origin) for name, each in one.items())]
    lost = conversion.lost()
    if lost:
        lines += ["", "# Without counterpart:", *map(comment, lost)]
    return "\n".join(lines) + "\n"


def _section(conversion: Conversion, section: str, empty: set[str]) -> Iterator[str]:
    for key in keys().values():
        if key.section == section and key.path in conversion.values:
            carried = conversion.values[key.path]
            yield _line(key.name, carried.value, carried.origin)
        elif key.section == section and key.path in empty and key.annotation is str:
            yield _line(key.name, "", "still to be set")


def _line(name: str, value: Any, origin: str) -> str:
    setting = f"{name} = {toml_value(value)}"
    return f"{setting:<{_COLUMN}}  {comment(' '.join(origin.split()))}"
