"""One value of a TOML text changed, added or removed; comments, order and all else stay as they are."""

from __future__ import annotations

from flame_train.config.parse import parse
from flame_train.config.toml_lines import key_spans
from flame_train.errors import ConfigError

_NAME = "config"


def with_value(text: str, section: str, name: str, written: str | None) -> str:
    """Returns the text with a key of a section at the value that is `written` in TOML; None: without the key.

    Raises ConfigError for a text that is no TOML, and where the key cannot be changed by itself.
    """
    before, _ = parse(text, _NAME)
    pairs, ends = key_spans(text)
    pair, end = pairs.get((section, name)), ends.get((section,))
    if pair is not None:
        new = _without(text, pair.key, pair.end) if written is None else text[: pair.value] + written + text[pair.end :]
    elif written is None:
        new = text
    elif end is not None:
        at = _line_end(text, end)
        new = f"{text[:at]}\n{name} = {written}{text[at:]}"
    else:
        new = f"{text.rstrip()}\n\n[{section}]\n{name} = {written}\n".lstrip("\n")
    _refuse_other_change(before, new, section, name, written)
    return new


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _without(text: str, start: int, end: int) -> str:
    """Returns the text without a pair, and without its line where nothing but a comment stands beside it."""
    first, last = text.rfind("\n", 0, start) + 1, _line_end(text, end)
    rest = text[end:last].strip()
    if text[first:start].strip() or (rest and not rest.startswith("#")):
        raise ConfigError(_BY_HAND)
    return text[:first] + text[last + 1 :]


_BY_HAND = "expected a line of its own for this key; change it in the TOML"


def _refuse_other_change(before: dict[str, object], new: str, section: str, name: str, written: str | None) -> None:
    """Raises ConfigError unless that key alone became another."""
    try:
        after, _ = parse(new, _NAME)
        wanted = None if written is None else parse(f"v = {written}", _NAME)[0]["v"]
    except ConfigError:
        raise ConfigError(_BY_HAND) from None
    tables = [tree.get(section, {}) for tree in (before, after)]
    if not all(isinstance(table, dict) for table in tables):
        raise ConfigError(_BY_HAND)
    rests = [{k: v for k, v in table.items() if k != name} for table in tables if isinstance(table, dict)]
    others = [{k: v for k, v in tree.items() if k != section} for tree in (before, after)]
    found = tables[1].get(name) if isinstance(tables[1], dict) else None
    if rests[0] != rests[1] or others[0] != others[1] or found != wanted:
        raise ConfigError(_BY_HAND)
