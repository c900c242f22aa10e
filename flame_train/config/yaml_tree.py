"""YAML 1.2 text to a plain tree with line numbers, from parser events.

A configuration is a tree of mappings, lists and scalars. The reader refuses everything else of YAML: tags, anchors
and aliases, several documents, duplicate keys. So no file constructs objects, cycles or exponential expansions. Plain
scalars follow the YAML 1.2 core schema: `no` is text and `1e-4` a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from flame_train.errors import ConfigError

Path = tuple[str, ...]

_INTEGER = re.compile(r"[-+]?[0-9]{1,1000}|0o[0-7]{1,1000}|0x[0-9a-fA-F]{1,1000}")  # Python caps the digits
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_DEPTH = 32


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Returns the tree of `text` and the 1-based line of each key. `name` is the file's, for messages.

    Raises ConfigError for a syntax error or for anything outside the subset, with the line.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return _Builder(iter(YAML(typ="safe", pure=True).parse(text)), name).document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError(f"{name}:{line}: expected YAML, got a syntax error: {error.problem}") from None
    except YAMLError as error:
        raise ConfigError(f"{name}: expected YAML, got: {str(error).splitlines()[0]}") from None
    except (ValueError, OverflowError) as error:  # an escape beyond Unicode
        raise ConfigError(f"{name}: expected YAML, got an escape that stands for no character: {error}") from None


class _Builder:
    def __init__(self, events: Iterator[Any], name: str) -> None:
        self.events = events
        self.name = name
        self.lines: dict[Path, int] = {}

    def document(self) -> tuple[dict[str, Any], dict[Path, int]]:
        next(self.events)  # start of the stream
        event = next(self.events)
        if type(event).__name__ == "StreamEndEvent":
            return {}, {}
        tree = self._node(next(self.events), ())
        next(self.events)  # end of the document
        after = next(self.events)
        if type(after).__name__ != "StreamEndEvent":
            raise self._refuse(after, "one document, got a second one")
        if tree is None:
            return {}, {}
        if not isinstance(tree, dict):
            raise ConfigError(f"{self.name}:1: expected sections with keys, got {type(tree).__name__}")
        return tree, self.lines

    def _refuse(self, event: Any, what: str) -> ConfigError:
        return ConfigError(f"{self.name}:{event.start_mark.line + 1}: expected {what}")

    def _node(self, event: Any, path: Path) -> Any:
        kind = type(event).__name__
        if kind == "AliasEvent" or event.anchor is not None:
            raise self._refuse(event, "plain values, got an anchor or alias (& or *); write the value out")
        if event.tag is not None:
            raise self._refuse(event, f"plain values, got the tag {event.tag}; remove it")
        if len(path) > _DEPTH:
            raise self._refuse(event, f"at most {_DEPTH} levels of nesting")
        if kind == "MappingStartEvent":
            return self._mapping(path)
        if kind == "SequenceStartEvent":
            return self._sequence(path)
        return _scalar(event.value) if event.implicit[0] else event.value

    def _mapping(self, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while type(event := next(self.events)).__name__ != "MappingEndEvent":
            if type(event).__name__ != "ScalarEvent":
                raise self._refuse(event, "a name as key")
            key = event.value
            if not _is_text(key):
                raise self._refuse(event, "a name as key, got an escape that stands for half a character")
            if key in mapping:
                first = self.lines[(*path, key)]
                raise self._refuse(event, f"each key once, got {key} again (first on line {first})")
            self.lines[(*path, key)] = event.start_mark.line + 1
            mapping[key] = self._node(next(self.events), (*path, key))
        return mapping

    def _sequence(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while type(event := next(self.events)).__name__ != "SequenceEndEvent":
            below = (*path, f"[{len(items)}]")
            self.lines[below] = event.start_mark.line + 1
            items.append(self._node(event, below))
        return items


def _is_text(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _scalar(text: str) -> Any:
    if text in _SPECIAL:
        return _SPECIAL[text]
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _SPECIAL_FLOAT.fullmatch(text):
        return float(f"{special.group(1) or ''}inf" if special.group(2) else "nan")
    return text
