"""The header of a GGUF file, read within the bounds of the file's own size.

It begins with a magic number, the version, and the counts of tensors and of key-value pairs. The pairs follow, and then
each tensor's name, dims, type and offset (github.com/ggml-org/ggml/blob/master/docs/gguf.md). The data begin at a
multiple of the alignment. A list is passed over unless somebody asks for it, so vocabularies cost no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flame_train.io.header import MAX_NAME, MAX_RANK, MAX_TENSORS
from flame_train.io.sniff import GGUF_MAGIC

ORIGINAL_SHAPE: Final = "comfy.gguf.orig_shape."  # of tensors whose rows were too short for blocks
_VERSIONS: Final = (2, 3)
_FORMATS: Final = "BbHhIifBsaQqd"  # of the value of each type, by its number
_STRING, _ARRAY = _FORMATS.index("s"), _FORMATS.index("a")
_MOST_PAIRS: Final = 1 << 16
_MOST_TEXTS: Final = 1 << 20  # in all lists, which are passed over one by one; Gemma's vocabulary has 780,000
_LONGEST: Final = 1 << 16  # bytes of a text that is kept
_ALIGNMENT: Final = "general.alignment"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the header has it: its dims as PyTorch has them, its type's number, where its data begin."""

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Texts and numbers by key, and the lists of numbers that give tensors' shapes; and the tensors in file order."""

    values: Mapping[str, str | int | float | bool]
    shapes: Mapping[str, tuple[int, ...]]
    tensors: tuple[GgufTensor, ...]


def read_header(data: Any) -> GgufHeader:
    """The header of a file's bytes. Raises ValueError for one that is damaged, or says more than the file holds."""
    return _Reader(data).header()


class _Reader:
    def __init__(self, data: Any) -> None:
        self._data, self._at, self._texts = memoryview(data), 0, 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != GGUF_MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, which another processor's byte order may have made of 2 or 3")
        tensors, pairs = self._number("Q"), self._number("Q")
        if tensors > MAX_TENSORS or pairs > _MOST_PAIRS:
            raise ValueError(f"{tensors} tensors and {pairs} keys; at most {MAX_TENSORS} and {_MOST_PAIRS} are read")
        values, shapes = dict[str, str | int | float | bool](), dict[str, tuple[int, ...]]()
        for _ in range(pairs):
            key, kind = self._text(), self._number("I")
            if key in values or key in shapes:
                raise ValueError(f"the key {key!r} comes twice")
            if kind == _ARRAY:
                self._list(key, shapes)
            else:
                values[key] = self._value(kind)
        listed = [self._tensor() for _ in range(tensors)]
        return GgufHeader(values, shapes, self._placed(listed, values))

    def _placed(self, listed: list[GgufTensor], values: Mapping[str, Any]) -> tuple[GgufTensor, ...]:
        alignment = values.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment}")
        if len({each.name for each in listed}) < len(listed):
            raise ValueError("a tensor's name comes twice")
        first = -(-self._at // alignment) * alignment
        return tuple(GgufTensor(each.name, each.shape, each.kind, first + each.begin) for each in listed)

    def _tensor(self) -> GgufTensor:
        name, rank = self._text(), self._number("I")
        if len(name) > MAX_NAME or rank > MAX_RANK:
            raise ValueError(f"a tensor with a name of {len(name)} characters and {rank} dims")
        dims = [self._number("Q") for _ in range(rank)]
        return GgufTensor(name, tuple(reversed(dims)), self._number("I"), self._number("Q"))

    def _list(self, key: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """Passes over a list; one that gives a tensor's shape is kept."""
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ValueError(f"{key!r} is a list of lists")
        if kind == _STRING:
            if count * 8 > len(self._data) - self._at:
                raise ValueError(f"{key!r} has {count} texts, more than the file has room for")
            self._texts += count
            if self._texts > _MOST_TEXTS:
                raise ValueError(f"{self._texts} texts in lists; at most {_MOST_TEXTS} are read")
            for _ in range(count):
                self._skip(self._number("Q"))
            return
        form = self._form(kind)
        if key.startswith(ORIGINAL_SHAPE) and count <= MAX_RANK and form in "BbHhIiQq":
            shapes[key.removeprefix(ORIGINAL_SHAPE)] = tuple(self._number(form) for _ in range(count))
        else:
            self._skip(count * struct.calcsize(form))

    def _value(self, kind: int) -> str | int | float | bool:
        if kind == _STRING:
            return self._text()
        number: int | float = self._number(self._form(kind))
        return bool(number) if kind == 7 else number

    def _form(self, kind: int) -> str:
        if kind >= len(_FORMATS):
            raise ValueError(f"a value of the unknown type {kind}")
        return _FORMATS[kind]

    def _text(self) -> str:
        length = self._number("Q")
        if length > _LONGEST:
            self._skip(length)
            return f"({length} bytes)"
        return self._bytes(length).decode("utf-8")

    def _number(self, form: str) -> Any:
        begin = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(f"<{form}", self._data, begin)[0]

    def _bytes(self, count: int) -> bytes:
        begin = self._at
        self._skip(count)
        return bytes(self._data[begin : self._at])

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ValueError(f"{count} bytes are said to follow at {self._at}, beyond the file's end")
        self._at += count
