"""Captions: a text file for each image, or one metadata.jsonl, metadata.csv or meta_cap.json for a whole folder.

Text is UTF-8, or UTF-8, UTF-16 or UTF-32 with a byte order mark. Anything else is refused with its line, not
guessed: a wrong guess would train on garbage unseen.
"""

from __future__ import annotations

import codecs
import csv
import json
import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from flame_train.data.file_reading import read_bytes
from flame_train.errors import DataError, shown

MAX_CAPTION_BYTES = 64 * 1024
MAX_METADATA_BYTES = 256 * 1024 * 1024

_MARKS = (  # the 32-bit marks first: the 16-bit one begins them
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_JOINERS: Final = "\u200c\u200d"
_UNSEEN: Final = ("Cf", "Cc")  # categories of Unicode


@dataclass(frozen=True, slots=True)
class Entry:
    """What a metadata file says of one image."""

    caption: str
    line: int  # from 1; 0 where the file has no lines


@dataclass(frozen=True, slots=True)
class Metadata:
    """A metadata file: entries by relative posix path, and one sentence for each line that is wrong."""

    entries: Mapping[str, Entry]
    problems: tuple[str, ...]


def decode_text(data: bytes, name: str) -> str:
    r"""Returns bytes of a text file as text with "\n" line ends and no byte order mark.

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
    text = text.lstrip("\ufeff")  # editors may have put a mark before a mark
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    at = text.find("\0")
    if at >= 0:
        line = text.count("\n", 0, at) + 1
        raise DataError(f"{name}:{line}: holds a NUL character: save the file as plain UTF-8 text")
    return text


def hidden(text: str) -> str:
    """Returns the first character that nobody sees and the model does, with its place; empty if there is none.

    Joiners between letters other than ASCII are none: some scripts and emoji need them.
    """
    for at, character in enumerate(text):
        if character.isascii() and character.isprintable():
            continue
        joined = text[at - 1 : at] + text[at + 1 : at + 2]
        needed = character in _JOINERS and len(joined) == 2 and not any(map(str.isascii, joined))
        if unicodedata.category(character) in _UNSEEN and character not in "\t\n" and not needed:
            before = f" after {text[max(0, at - 20) : at]!r}" if at else " at the beginning"
            return f"U+{ord(character):04X}{before}"
    return ""


def one_line(text: str) -> str:
    """Returns a caption as the tokenizer gets it: its lines stripped and joined by single spaces."""
    return " ".join(part for part in (line.strip() for line in text.split("\n")) if part)


def read_captions(path: Path | str, name: str | None = None, *, lines: bool = False) -> tuple[str, ...]:
    """Returns a file's captions: one, or with `lines` one a line that is not blank. DataError beginning with `name`."""
    label = name if name is not None else shown(path)
    text = decode_text(read_bytes(path, limit=MAX_CAPTION_BYTES, name=label), label)
    if not lines:
        return (one_line(text),)
    return tuple(line.strip() for line in text.split("\n") if line.strip()) or ("",)


def read_metadata(path: Path, name: str | None = None) -> Metadata:
    """Read a file that `METADATA_NAMES` lists; its form follows from its name.

    - metadata.jsonl: a JSON object a line with `file_name` and `text` or `caption`.
    - metadata.csv: columns `file_name` and `text` or `caption`.
    - meta_cap.json, of sd-scripts: an object of objects with `caption` and `tags`, by the image's name with or without
      its ending.

    Other fields are ignored, blank lines too. Wrong lines are gathered in `problems`; DataError is raised
    only if the file as a whole cannot be read.
    """
    label = name if name is not None else shown(path)
    text = decode_text(read_bytes(path, limit=MAX_METADATA_BYTES, name=label), label)
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for number, parse in _METADATA[path.name](text, label):
        try:
            key, caption = parse()
            if key in entries:
                raise DataError(f"{shown(key)} is listed already in line {entries[key].line}: keep one line")
            entries[key] = Entry(caption, number)
        except DataError as error:
            problems.append(f"{label}:{number}: {error}" if number else f"{label}: {error}")
    return Metadata(entries, tuple(problems))


_Parsed = Iterator[tuple[int, Callable[[], tuple[str, str]]]]
"""Of each image: its line, and what gives (relative posix path, caption) or raises DataError without a place."""


def _json_lines(text: str, label: str) -> _Parsed:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, partial(_parse_line, line)


def _csv(text: str, label: str) -> _Parsed:
    rows = csv.reader(text.split("\n"), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        if "file_name" not in header or not {"text", "caption"} & set(header):
            raise DataError(f"{label}:1: expected the columns file_name and text, got {', '.join(header) or 'none'}")
        for row in rows:
            if row:
                yield rows.line_num, partial(_parse_row, header, row)
    except csv.Error as error:
        raise DataError(f"{label}:{rows.line_num}: not valid CSV ({error}): mend the line") from error


def _meta_cap(text: str, label: str) -> _Parsed:
    content = _json_object(text, "an object by image", "mend the file or remove it", f"{label}: ")
    for name, record in content.items():
        yield 0, partial(_parse_meta_cap, name, record)


_METADATA: Final[Mapping[str, Callable[[str, str], _Parsed]]] = {
    "metadata.jsonl": _json_lines,
    "metadata.csv": _csv,
    "meta_cap.json": _meta_cap,
}
METADATA_NAMES: Final = tuple(_METADATA)
"""Files with the captions of a whole folder, and of the folders in it."""


def _parse_row(header: Sequence[str], row: Sequence[str]) -> tuple[str, str]:
    if len(row) != len(header):
        raise DataError(f"expected {len(header)} columns, got {len(row)}: put text with commas in quotes")
    record = dict(zip(header, row, strict=True))
    if not record["file_name"]:
        raise DataError("expected file_name with a relative path, got nothing: name the image")
    return _relative_key(record["file_name"]), _caption_of(record)


def _parse_meta_cap(name: str, record: Any) -> tuple[str, str]:
    """Joins caption and tags by a comma, as sd-scripts does."""
    if not isinstance(record, dict):
        raise DataError(f"{shown(name)}: expected an object, got {type(record).__name__}")
    parts = [record[key] for key in ("caption", "tags") if record.get(key)]
    if not all(isinstance(part, str) for part in parts):
        raise DataError(f"{shown(name)}: caption and tags must be text: put them in quotes")
    return _relative_key(name), _caption_of({"text": ", ".join(parts)})


def _parse_line(line: str) -> tuple[str, str]:
    """Returns (relative posix path, caption) of one line. Raises DataError without a place."""
    record = _json_object(line, "an object", "write one object a line")
    name = record.get("file_name")
    if not isinstance(name, str) or not name:
        raise DataError(f'expected "file_name" with a relative path, got {name!r}: name the image')
    return _relative_key(name), _caption_of(record)


def _json_object(text: str, what: str, advice: str, place: str = "") -> dict[str, Any]:
    """Returns the object in JSON. DataError, which begins with `place` and says `what` was expected, for all else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}not valid JSON ({error}): {advice}") from error
    if not isinstance(value, dict):
        raise DataError(f"{place}expected {what}, got {type(value).__name__}: {advice}")
    return value


def _relative_key(name: str) -> str:
    """Returns `name` normalised. Raises DataError for a path that could leave the dataset's folder."""
    if "\0" in name:
        raise DataError('"file_name" holds a NUL character: write a plain relative path')
    parts = name.replace("\\", "/").split("/")
    if name[0] in "/\\" or ".." in parts or re.match(r"[A-Za-z]:[/\\]", name):
        raise DataError(f'"file_name" {shown(name)} leads out of the folder: write a path relative to it, without ".."')
    return posixpath.normpath(name)


def _caption_of(record: Mapping[str, Any]) -> str:
    captions = {field: record[field] for field in ("text", "caption") if record.get(field) is not None}
    if not captions:
        raise DataError('expected "text" or "caption": add one (it may be "")')
    for field, value in captions.items():
        if not isinstance(value, str):
            raise DataError(f'"{field}" must be text, got {type(value).__name__}: put it in quotes')
    if len(set(captions.values())) > 1:
        raise DataError('"text" and "caption" differ: keep one')
    caption: str = next(iter(captions.values()))
    if "\0" in caption or any(0xD800 <= ord(c) <= 0xDFFF for c in caption):
        raise DataError("the caption holds a NUL character or half a surrogate pair: write plain text")
    if len(caption.encode()) > MAX_CAPTION_BYTES:
        raise DataError(f"the caption is longer than {MAX_CAPTION_BYTES:,} bytes: shorten it")
    return one_line(caption.replace("\r\n", "\n").replace("\r", "\n"))
