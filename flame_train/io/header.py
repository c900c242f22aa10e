"""The safetensors header: a strict parser for files nobody vouches for, and the writer's other half.

Layout of a file: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' data with
no gap. The parser walks the JSON bytes in place and builds only the result. So a header made to exhaust memory is
refused at its first wrong byte. Every refusal is a `HeaderError` with a reason only; the caller knows the file's
name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flame_train.io.dtypes import DTYPE_OF_TAG, RANK_OF_TAG

MAX_HEADER_BYTES: Final = 100_000_000
MAX_TENSORS: Final = 1 << 14  # the largest of published models have some 3,000; what is done with each takes time
MAX_NAME: Final = 1000  # characters; the longest of published models have some 150
MAX_RANK: Final = 64  # what NumPy can hold
MAX_ENTRY_BYTES: Final = 4096
MAX_COUNT: Final = 2**63 - 1

_TOKENS: Final = {
    token: re.compile(rb"[ \t\n\r]*+" + re.escape(token) + rb"[ \t\n\r]*+") for token in (b"{", b"}", b":", b",")
}
_STRING: Final = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"', re.DOTALL)
_MINUS_ZERO: Final = re.compile(rb"[\[,\s]-0[\],\s]")  # whole numbers to Python, none to the format's reference reader
_FLAT_OBJECT: Final = re.compile(rb"\{[^{}]*+\}")
_PAIRS: Final = json.JSONDecoder(object_pairs_hook=list)


class HeaderError(ValueError):
    """A reason why the header cannot be believed."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: its tag, its shape, the bytes it takes, and where they begin after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `tensors` is in file order; `data_bytes` is what must follow the header."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_bytes: int


def parse_header(buffer: Any, begin: int, end: int) -> Header:
    """Parse the JSON in `buffer[begin:end]` (bytes or a memory map). Raises HeaderError."""
    cursor = _Cursor(buffer, begin, end)
    if not cursor.at(b"{"):
        raise HeaderError("the header does not begin with '{'")
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    for key in cursor.object_keys("the header"):
        if key == "__metadata__":
            if metadata is not None:
                raise HeaderError("the header holds __metadata__ twice")
            metadata = _parse_metadata(cursor)
            continue
        if len(key) > MAX_NAME:
            raise HeaderError(
                f"tensor {_shortened(key)} has a name of {len(key)} characters; at most {MAX_NAME} are read"
            )
        if key in tensors:
            raise HeaderError(f"tensor {key!r} is listed twice")
        if len(tensors) == MAX_TENSORS:
            raise HeaderError(f"the header lists more than {MAX_TENSORS} tensors")
        tensors[key] = _parse_tensor(key, cursor)
    cursor.only_spaces_left()
    ordered, total = _check_contiguous(tensors)
    return Header(ordered, metadata or {}, total)


def build_header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, list[TensorInfo]]:
    """The header's bytes, length included, and the tensors in file order with their places filled in.

    Order: widest dtype first, then by name. Metadata keys are sorted, so equal contents give equal bytes. Spaces pad
    the header to a multiple of 8, so every tensor is aligned to its width.
    """
    placed: list[TensorInfo] = []
    fields: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for info in sorted(tensors, key=lambda info: (-RANK_OF_TAG[info.dtype], info.name)):
        end = begin + info.nbytes
        fields[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        placed.append(TensorInfo(info.name, info.dtype, info.shape, info.nbytes, begin))
        begin = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, placed


class _Cursor:
    """A position in the header's bytes, which moves only past valid syntax."""

    def __init__(self, buffer: Any, begin: int, end: int) -> None:
        self.buffer = buffer
        self.position = begin
        self.end = end

    def at(self, token: bytes) -> bool:
        return bytes(self.buffer[self.position : min(self.position + len(token), self.end)]) == token

    def take(self, token: bytes) -> bool:
        return self._skip(_TOKENS[token]) is not None

    def expect(self, token: bytes, where: str) -> None:
        if not self.take(token):
            raise HeaderError(f"{where}: expected {token.decode()!r}, found {self.excerpt()}")

    def string(self, where: str) -> str:
        raw = self._skip(_STRING)
        if raw is None:
            raise HeaderError(f"{where}: expected a string, found {self.excerpt()}")
        try:
            text: str = json.loads(raw.decode("utf-8"))
            text.encode("utf-8")  # an escaped half of a surrogate pair passes json but is no text
        except ValueError as error:
            raise HeaderError(f"{where}: a string that is not valid UTF-8 JSON ({error})") from None
        return text

    def flat_object(self, where: str) -> list[tuple[str, Any]]:
        """The key-value pairs of the small object here, as json has them, repeated keys included."""
        limit = min(self.position + MAX_ENTRY_BYTES, self.end)
        match = _FLAT_OBJECT.match(self.buffer, self.position, limit)
        if match is None:
            raise HeaderError(f"{where}: expected a short {{...}}, found {self.excerpt()}")
        self.position = match.end()
        if _MINUS_ZERO.search(match.group()):
            raise HeaderError(f"{where}: -0 is no size and no place")
        try:
            pairs: list[tuple[str, Any]] = _PAIRS.decode(match.group().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise HeaderError(f"{where}: not valid JSON ({error})") from None
        return pairs

    def object_keys(self, where: str) -> Iterable[str]:
        """Yield each key of the object here; the caller consumes the value before asking for the next."""
        self.expect(b"{", where)
        if self.take(b"}"):
            return
        while True:
            key = self.string(where)
            self.expect(b":", f"{where}, key {_shortened(key)}")
            yield key
            if self.take(b"}"):
                return
            self.expect(b",", f"{where}, after key {_shortened(key)}")

    def only_spaces_left(self) -> None:
        rest = self.buffer[self.position : self.end]
        if bytes(rest).strip(b" "):
            raise HeaderError(f"the header goes on after its closing brace: {self.excerpt()}")

    def excerpt(self) -> str:
        found = bytes(self.buffer[self.position : min(self.position + 24, self.end)])
        return repr(found.decode("utf-8", "replace")) if found else "the end of the header"

    def _skip(self, pattern: re.Pattern[bytes]) -> bytes | None:
        match = pattern.match(self.buffer, self.position, self.end)
        if match is None:
            return None
        self.position = match.end()
        return match.group()


def _parse_metadata(cursor: _Cursor) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for key in cursor.object_keys("__metadata__"):
        if key in metadata:
            raise HeaderError(f"__metadata__ holds {_shortened(key)} twice")
        metadata[key] = cursor.string(f"__metadata__ value of {_shortened(key)}")
    return metadata


def _parse_tensor(name: str, cursor: _Cursor) -> TensorInfo:
    where = f"tensor {_shortened(name)}"
    pairs = cursor.flat_object(where)
    fields = dict(pairs)
    if len(pairs) != 3 or fields.keys() != {"dtype", "shape", "data_offsets"}:
        keys = ", ".join(_shortened(key) for key, _ in pairs)
        raise HeaderError(f"{where}: expected dtype, shape and data_offsets, once each, found {keys or 'nothing'}")
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_TAG:
        raise HeaderError(f"{where} has dtype {_shortened(dtype)}; readable are {', '.join(DTYPE_OF_TAG)}")
    shape = _counts(fields["shape"], f"{where}: shape")
    offsets = _counts(fields["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise HeaderError(f"{where}: data_offsets must be [begin, end], found {list(offsets)}")
    return _checked_tensor(TensorInfo(name, dtype, shape, offsets[1] - offsets[0], offsets[0]))


def _counts(value: Any, where: str) -> tuple[int, ...]:
    """`value` as sizes. `type() is int`, because JSON's true is an int to Python."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise HeaderError(f"{where} must be a list of whole numbers, found {_shortened(value)}")
    if len(value) > MAX_RANK:
        raise HeaderError(f"{where} has {len(value)} entries; at most {MAX_RANK} are possible")
    if any(item > MAX_COUNT for item in value):
        raise HeaderError(f"{where} overflows 64 bits: {_shortened(value)}")
    return tuple(value)


def _checked_tensor(info: TensorInfo) -> TensorInfo:
    where = f"tensor {_shortened(info.name)}: shape {list(info.shape)}"
    itemsize = DTYPE_OF_TAG[info.dtype].itemsize
    if math.prod(max(size, 1) for size in info.shape) * itemsize > MAX_COUNT:
        raise HeaderError(f"{where} overflows 64 bits")
    needed = math.prod(info.shape) * itemsize
    if needed != info.nbytes:
        raise HeaderError(f"{where} of {info.dtype} takes {needed} bytes, its place holds {info.nbytes}")
    return info


def _check_contiguous(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], int]:
    """The tensors in file order and the bytes they cover. Raises HeaderError on a hole or an overlap."""
    ordered: dict[str, TensorInfo] = {}
    expected = 0
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.begin + info.nbytes)):
        if info.begin != expected:
            kind = "leaves a hole" if info.begin > expected else "overlaps another tensor"
            raise HeaderError(f"tensor {_shortened(info.name)} {kind}: begins at {info.begin}, expected {expected}")
        ordered[info.name] = info
        expected += info.nbytes
    return ordered, expected


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
