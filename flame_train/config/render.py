"""A configuration as TOML text: commented, for a person to edit, or resolved, for the run folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import date, time
from typing import Any, Final

from pydantic import BaseModel

from flame_train.config.keys import Key, applies, keys, sections
from flame_train.config.schema import FORMAT, Config
from flame_train.errors import shown

_COMMENT_COLUMN = 28
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def commented(
    config: Config, title: str, leave_out: Collection[str] = (), notes: Mapping[str, str] | None = None
) -> str:
    """Every key of `config` with its value, meaning, allowed values and unit, but for those to `leave_out` by path.

    Keys of other choices than those of `config` are comments, with the choice that has them.
    `title` is the first line; `notes` are words before a key's meaning, by path.
    """
    lines = [f"# {title}", "", f"format = {FORMAT}"]
    values = flat(config)
    for section in sections():
        lines += ["", comment(Config.model_fields[section].description or ""), f"[{section}]"]
        for key in keys().values():
            no_line = key.is_tables and not key.has_short_form and not values.get(key.path)
            if key.section != section or key.path in leave_out or no_line:
                continue
            if key.path not in values:
                lines.append(f"{f'# {key.name} = {toml_value(key.default)}':<{_COMMENT_COLUMN}}  # {_with_choice(key)}")
                continue
            setting = f"{key.name} = {toml_value(values[key.path])}"
            note = f"{notes[key.path]}. " if notes and key.path in notes else ""
            lines.append(f"{setting:<{_COMMENT_COLUMN}}  # {note}{_comment(key)}")
    return "\n".join(lines) + "\n"


def short(values: Mapping[str, Any], title: str, must: Collection[str], notes: Iterable[str]) -> str:
    """A config of few keys: first those that somebody must fill in, then `values`, by path; both with their meaning.

    `title` is the first line, each of `notes` a line after it.
    """
    lines = [f"# {title}", *(f"# {note}" for note in notes), "# Fill in the lines marked with <--.", ""]
    lines.append(f"format = {FORMAT}")
    written = {path: keys()[path].default for path in must} | dict(values)
    in_order = dict.fromkeys(path.partition(".")[0] for path in (*must, *values))
    for section in in_order:
        lines += ["", f"[{section}]"]
        for path, value in written.items():
            if path.startswith(f"{section}."):
                key = keys()[path]
                setting, mark = f"{key.name} = {toml_value(value)}", "<-- " if path in must else ""
                lines.append(f"{setting:<{_COMMENT_COLUMN}}  # {mark}{_comment(key)}")
    return "\n".join(lines) + "\n"


def resolved(config: Config) -> str:
    """Returns every key of `config` that means something, defaults filled in: the same text for the same config."""
    lines = [f"format = {FORMAT}"]
    values = flat(config)
    for section in sections():
        lines += ["", f"[{section}]"]
        own = [key for key in keys().values() if key.section == section and key.path in values]
        lines += [f"{key.name} = {toml_value(values[key.path])}" for key in own]
    return "\n".join(lines) + "\n"


def flat(config: Config) -> dict[str, Any]:
    """Returns each value by its path, in the order of the schema; keys of other choices are left out."""
    return {
        path: getattr(getattr(config, key.section), key.name)
        for path, key in keys().items()
        if applies(key, getattr(config, key.section))
    }


def decisive(config: Config) -> dict[str, Any]:
    """Returns the part of `flat` that the trained weights depend on."""
    return {path: value for path, value in flat(config).items() if not keys()[path].free}


def toml_value(value: Any) -> str:
    """`value` (text, number, date, truth value, or a list or table of them) as TOML writes it, read back unchanged."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(short := getattr(value, "short", None), str):
        return _quoted(short)
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {toml_value(item)}" for name, item in value.items()) + "}"
    raise TypeError(
        f"toml_value: expected text, a number, a truth value, a list or a table, got {type(value).__name__}"
    )


def comment(text: str) -> str:
    """Returns a text as a comment of TOML, which ends with its line."""
    return f"# {shown(text)}".rstrip()


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else _escape(c)) for c in text) + '"'


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _with_choice(key: Key) -> str:
    (choice,), (names,) = zip(*key.only.items(), strict=True)
    return (
        f"with {choice.partition('.')[2]} = {' or '.join(_choice_with_default(key, n) for n in names)}: {_comment(key)}"
    )


def _choice_with_default(key: Key, name: str) -> str:
    """Returns a choice that has a key, with the key's default there where that is another than the one shown."""
    default = key.defaults.get(name, key.default)
    return toml_value(name) + ("" if default == key.default else f" (default {toml_value(default)})")


def _comment(key: Key) -> str:
    choices = " | ".join(str(choice) for choice in key.choices)
    facts = ", ".join(fact for fact in (key.unit, choices, key.limits) if fact)
    return f"{key.doc} [{facts}]" if facts else key.doc
