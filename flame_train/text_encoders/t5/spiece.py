"""Reading a SentencePiece model file (`spiece.model`), a protocol buffer, as far as a unigram model needs it.

Field numbers are those of SentencePiece's `sentencepiece_model.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3  # of a piece
_MODEL_TYPE: Final = 3  # of the trainer
_CHARSMAP: Final = 2  # of the normalizer
_UNIGRAM: Final = 1
_USER_DEFINED: Final = 4

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Spiece:
    """The content of a model file: pieces with their log probabilities, in the order of their ids."""

    pieces: tuple[tuple[str, float], ...]
    user_defined: tuple[str, ...]  # pieces that are never cut
    charsmap: bytes  # how characters are normalised, in SentencePiece's compiled form; empty for not at all


def parse_spiece(data: bytes) -> Spiece:
    """The unigram model in a `spiece.model` file's bytes. ValueError for anything else."""
    pieces: list[tuple[str, float]] = []
    user_defined: list[str] = []
    charsmap, kind = b"", _UNIGRAM
    for number, value in _fields(data):
        if number == _PIECES:
            text, score, sort = _piece(_bytes(value))
            pieces.append((text, score))
            user_defined += [text] if sort == _USER_DEFINED else []
        elif number == _TRAINER:
            kind = next((v for n, v in _fields(_bytes(value)) if n == _MODEL_TYPE and isinstance(v, int)), kind)
        elif number == _NORMALIZER:
            charsmap = next((_bytes(v) for n, v in _fields(_bytes(value)) if n == _CHARSMAP), charsmap)
    if kind != _UNIGRAM:
        raise ValueError("a SentencePiece model of another kind than unigram")
    if not pieces:
        raise ValueError("no SentencePiece model: it holds no pieces")
    return Spiece(tuple(pieces), tuple(user_defined), charsmap)


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, sort = "", 0.0, 1
    for number, value in _fields(data):
        if number == _TEXT:
            text = _bytes(value).decode("utf-8")
        elif number == _SCORE:
            score = _float(_bytes(value))
        elif number == _TYPE and isinstance(value, int):
            sort = value
    return text, score, sort


def _float(data: bytes) -> float:
    if len(data) != 4:
        raise ValueError(f"no SentencePiece model: {len(data)} bytes where a float was expected")
    number: float = struct.unpack("<f", data)[0]
    return number


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("no SentencePiece model: a number where a message was expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of each field of a message: a number for a varint, else bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FOUR_BYTES, _EIGHT_BYTES):
            length = 4 if wire == _FOUR_BYTES else 8
        else:
            raise ValueError(f"no SentencePiece model: wire type {wire} at byte {at}")
        if length > len(data) - at:
            raise ValueError(f"a SentencePiece model that is cut off at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError(f"a SentencePiece model that is cut off at byte {at}")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError(f"no SentencePiece model: a number of over ten bytes at byte {at}")
