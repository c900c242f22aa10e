"""Captions: a text file for each image, or one metadata.jsonl for a whole folder.

Text is UTF-8, or UTF-8, UTF-16 or UTF-32 with a byte order mark. Anything else is refused with its line, not
guessed: a wrong guess would train on garbage unseen.
"""

from __future__ import annotations

import codecs
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame_train.data.files import read_bytes
from flame_train.errors import DataError, shown

MAX_CAPTION_BYTES = 64 * 1024
MAX_METADATA_BYTES = 256 * 1024 * 1024
METADATA_NAME = "metadata.jsonl"

_MARKS = (  # the 32-bit marks first: the 16-bit one begins them
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One image's line in metadata.jsonl."""

    caption: str
    line: int  # from 1


@dataclass(frozen=True, slots=True)
class Metadata:
    """A metadata.jsonl: entries by relative posix path, and one sentence for each line that is wrong."""

    entries: Mapping[str, Entry]
    problems: tuple[str, ...]


def decode_text(data: bytes, name: str) -> str:
    """Bytes of a text file as text with "\\n" line ends and no byte order mark.

    Raises DataError "name:line: ..." for bytes that are not the text they claim to be, and for NUL.
    """
    encoding = next((e for mark, e in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode(encoding, "ignore")
        line = before.count("\n") + 1
        raise DataError(
            f"{name}:{line}: not valid {encoding.upper()} ({error.reason} at byte {error.start:,}): "
            f"save the file as UTF-8"
        ) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    at = text.find("\0")
    if at >= 0:
        line = text.count("\n", 0, at) + 1
        raise DataError(f"{name}:{line}: holds a NUL character: save the file as plain UTF-8 text")
    return text


def one_line(text: str) -> str:
    """A caption as the tokenizer gets it: its lines stripped and joined by single spaces."""
    return " ".join(part for part in (line.strip() for line in text.split("\n")) if part)


def read_caption(path: Path, name: str | None = None) -> str:
    """The caption in a text file; "" if it holds only white space. Raises DataError beginning with `name`."""
    label = name if name is not None else shown(path)
    return one_line(decode_text(read_bytes(path, limit=MAX_CAPTION_BYTES, name=label), label))


def read_metadata(path: Path, name: str | None = None) -> Metadata:
    """Read metadata.jsonl: a JSON object a line with `file_name` and `text` or `caption`.

    Other fields are ignored, blank lines too. Wrong lines are gathered in `problems`; DataError is raised
    only if the file as a whole cannot be read.
    """
    label = name if name is not None else shown(path)
    text = decode_text(read_bytes(path, limit=MAX_METADATA_BYTES, name=label), label)
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            key, caption = _parse_line(line)
            if key in entries:
                raise DataError(f"{shown(key)} is listed already in line {entries[key].line}: keep one line")
            entries[key] = Entry(caption, number)
        except DataError as error:
            problems.append(f"{label}:{number}: {error}")
    return Metadata(entries, tuple(problems))


def _parse_line(line: str) -> tuple[str, str]:
    """(relative posix path, caption) of one line. Raises DataError without a place."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error}): write one object a line") from error
    if not isinstance(record, dict):
        raise DataError(f"expected an object, got {type(record).__name__}: write one object a line")
    name = record.get("file_name")
    if not isinstance(name, str) or not name:
        raise DataError(f'expected "file_name" with a relative path, got {name!r}: name the image')
    return _relative_key(name), _caption_of(record)


def _relative_key(name: str) -> str:
    """`name` normalised. Raises DataError for a path that could leave the dataset's folder."""
    if "\0" in name:
        raise DataError('"file_name" holds a NUL character: write a plain relative path')
    parts = name.replace("\\", "/").split("/")
    if name[0] in "/\\" or ".." in parts or re.match(r"[A-Za-z]:[/\\]", name):
        raise DataError(f'"file_name" {shown(name)} leads out of the folder: write a path relative to it, without ".."')
    return posixpath.normpath(name)


def _caption_of(record: Mapping[str, Any]) -> str:
    given = {field: record[field] for field in ("text", "caption") if record.get(field) is not None}
    if not given:
        raise DataError('expected "text" or "caption": add one (it may be "")')
    for field, value in given.items():
        if not isinstance(value, str):
            raise DataError(f'"{field}" must be text, got {type(value).__name__}: put it in quotes')
    if len(set(given.values())) > 1:
        raise DataError('"text" and "caption" differ: keep one')
    caption: str = next(iter(given.values()))
    if "\0" in caption or any(0xD800 <= ord(c) <= 0xDFFF for c in caption):
        raise DataError("the caption holds a NUL character or half a surrogate pair: write plain text")
    if len(caption.encode()) > MAX_CAPTION_BYTES:
        raise DataError(f"the caption is longer than {MAX_CAPTION_BYTES:,} bytes: shorten it")
    return one_line(caption.replace("\r\n", "\n").replace("\r", "\n"))
