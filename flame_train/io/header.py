"""The safetensors header: read by the format's own library within bounds, explained where refused, and written.

Layout of a file: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' data with no gap. The
library takes a name twice, further fields and 1000 dimensions, and gives 2 GB to a header made for that. So one pattern
bounds the form first, without keeping anything. A refusal is a `HeaderError` with a reason only; the caller knows the
file's name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from flame_train.io.dtypes import DTYPE_OF_TAG, RANK_OF_TAG

MAX_HEADER_BYTES: Final = 100_000_000
MAX_TENSORS: Final = 1 << 14  # the largest of published models have some 3,000; what is done with each takes time
MAX_NAME: Final = 1000  # characters; the longest of published models have some 150
MAX_RANK: Final = 64  # what NumPy can hold
MAX_COUNT: Final = 2**63 - 1
_MAX_PARSED: Final = 1 << 22  # bytes that Python parses; headers of the largest models have an eighth of that

_STRING: Final = r'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_SIZES: Final = rf"\[ (?:[0-9]{{1,19}}+ ,? ){{0,{MAX_RANK}}}+\]"
_FIELD: Final = rf'"(?:dtype" : "\w*+"|(?:shape|data_offsets)" : {_SIZES})'
_METADATA: Final = rf"\{{ (?:{_STRING} : {_STRING} ,? ){{0,{MAX_TENSORS}}}+\}}"
_TENSOR: Final = rf"\{{ (?:{_FIELD} ,? ){{3}}+\}}"
_ENTRY: Final = rf'(?:"__metadata__" : (?P<metadata>{_METADATA})|{_STRING} : {_TENSOR})'
_FORM: Final = re.compile(
    rf"\{{ (?:{_ENTRY} ,? ){{0,{MAX_TENSORS + 1}}}+\}}\x20*+".replace(" ", r"[ \t\n\r]*+").encode(), re.DOTALL
)
"""Every header that a writer of the format makes; where commas stand is the library's to check."""
_OFFSETS: Final = re.compile(
    rb'"data_offsets"[ \t\n\r]*+:[ \t\n\r]*+\['
)  # once a tensor: in a string quotes are escaped
_MINUS_ZERO: Final = re.compile(rb"[\[,\s]-0[\],\s]")  # a whole number to Python, none to the library


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


def read_header(path: Path, mapped: Any, end: int) -> Header:
    """Read the header of a whole file.

    Args:
        mapped: its bytes, as a memory map.
        end: where its header ends and the data begins.

    Returns:
        The header as the format's library has it. Where that refuses the file and the header alone is right, the header
        all the same: `data_bytes` then differs from the bytes that follow.

    Raises:
        HeaderError: a reason why the header cannot be believed.
    """
    form = _FORM.fullmatch(mapped, 8, end)
    reason = "it is not written as writers of the format do"
    if form is not None:
        try:
            with safe_open(path, framework="np") as file:
                parts = [(name, file.get_slice(name)) for name in file.offset_keys()]
                metadata = file.metadata() or {}
            tensors = _in_place((name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts)
        except SafetensorError as error:
            reason = str(error)
        else:
            once = len(json.loads(form["metadata"] or b"{}", object_pairs_hook=list)) == len(metadata)
            once &= len(_OFFSETS.findall(mapped, 8, end)) == len(tensors)
            if once and len(tensors) <= MAX_TENSORS and all(len(name) <= MAX_NAME for name in tensors):
                return Header(tensors, metadata, sum(info.nbytes for info in tensors.values()))
    header = parse_header(bytes(mapped[8 : min(end, 9 + _MAX_PARSED)]))
    if header.data_bytes == len(mapped) - end:
        raise HeaderError(f"the header is refused by the safetensors library: {reason}")
    return header


def parse_header(text: bytes) -> Header:
    """Parses a header alone, to say what is wrong with one, or for data elsewhere. Raises HeaderError."""
    if not text.startswith(b"{"):
        raise HeaderError("the header does not begin with '{'")
    if len(text) > _MAX_PARSED:
        raise HeaderError(f"the header lists too much, or takes more than {_MAX_PARSED} bytes in a form of its own")
    try:
        entries, end = _PAIRS.raw_decode(text.decode("utf-8"))
        json.dumps(entries, ensure_ascii=False).encode()  # an escaped half of a surrogate pair is no text
    except UnicodeError as error:
        raise HeaderError(f"the header is not valid UTF-8 ({error})") from None
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"the header is not valid JSON ({error})") from None
    if text.decode()[end:].strip(" "):
        raise HeaderError(f"the header goes on after its closing brace: {_shortened(text.decode()[end:])}")
    listed = [(name, fields) for name, fields in entries if name != "__metadata__"]
    several = [fields for name, fields in entries if name == "__metadata__"]
    if len(several) > 1:
        raise HeaderError("the header holds __metadata__ twice")
    if len(listed) > MAX_TENSORS:
        raise HeaderError(f"the header lists more than {MAX_TENSORS} tensors")
    tensors = [_parse_tensor(name, fields) for name, fields in listed]
    _require_once([info.name for info in tensors], "tensor {} is listed twice")
    if _MINUS_ZERO.search(text):
        raise HeaderError("-0 is no size and no place")
    ordered = _check_contiguous(tensors)
    return Header(ordered, _parse_metadata(several[0] if several else ()), sum(info.nbytes for info in tensors))


def build_header(
    tensors: Iterable[TensorInfo], metadata: Mapping[str, str], after: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, list[TensorInfo]]:
    """Returns the header's bytes, length included, and the tensors in file order with their places filled in.

    Order: widest dtype first, then by name. Metadata keys are sorted, so equal contents give equal bytes. Spaces pad
    the header to a multiple of 8, so every tensor is aligned to its width. Tensors that `after` names follow the wider
    ones that it gives for them; their sizes must be multiples of those widths.
    """
    tensors = list(tensors)
    order = {info.name: (-RANK_OF_TAG[info.dtype], info.name) for info in tensors}
    placed: list[TensorInfo] = []
    fields: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for info in sorted(tensors, key=lambda info: (*order[after.get(info.name, info.name)], info.name in after)):
        end = begin + info.nbytes
        fields[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        placed.append(TensorInfo(info.name, info.dtype, info.shape, info.nbytes, begin))
        begin = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, placed


def _in_place(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
    """Give tensors in file order their sizes and places, which leave no gap."""
    placed: dict[str, TensorInfo] = {}
    begin = 0
    for name, dtype, shape in tensors:
        nbytes = _nbytes(name, dtype, shape)
        placed[name] = TensorInfo(name, dtype, shape, nbytes, begin)
        begin += nbytes
    return placed


def _nbytes(name: str, dtype: Any, shape: tuple[int, ...]) -> int:
    """Raises HeaderError for an unknown dtype, and sizes beyond 64 bits, zeros aside."""
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_TAG:
        words = f"{_shortened(dtype)}; readable are {', '.join(DTYPE_OF_TAG)}"
        raise HeaderError(f"tensor {_shortened(name)} has dtype {words}")
    itemsize = DTYPE_OF_TAG[dtype].itemsize
    if math.prod(max(size, 1) for size in shape) * itemsize > MAX_COUNT:
        raise HeaderError(f"tensor {_shortened(name)}: shape {list(shape)} overflows 64 bits")
    return math.prod(shape) * itemsize


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, repeated keys included."""


_PAIRS: Final = json.JSONDecoder(object_pairs_hook=_Pairs)


def _require_once(names: Iterable[str], message: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise HeaderError(message.format(_shortened(name)))
        seen.add(name)


def _parse_metadata(pairs: Any) -> dict[str, str]:
    if pairs != () and not isinstance(pairs, _Pairs):
        raise HeaderError(f"__metadata__: expected {{...}}, found {_shortened(pairs)}")
    for key, value in pairs:
        if not isinstance(value, str):
            raise HeaderError(f"__metadata__ value of {_shortened(key)}: expected a string, found {_shortened(value)}")
    _require_once((key for key, _ in pairs), "__metadata__ holds {} twice")
    return dict(pairs)


def _parse_tensor(name: str, pairs: Any) -> TensorInfo:
    where = f"tensor {_shortened(name)}"
    if len(name) > MAX_NAME:
        raise HeaderError(f"{where} has a name of {len(name)} characters; at most {MAX_NAME} are read")
    keys = [key for key, _ in pairs] if isinstance(pairs, _Pairs) else []
    if sorted(keys) != ["data_offsets", "dtype", "shape"]:
        words = ", ".join(map(_shortened, keys)) or _shortened(pairs)
        raise HeaderError(f"{where}: expected dtype, shape and data_offsets, once each, found {words}")
    fields = dict(pairs)
    dtype = fields["dtype"]
    shape = _counts(fields["shape"], f"{where}: shape")
    offsets = _counts(fields["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise HeaderError(f"{where}: data_offsets must be [begin, end], found {list(offsets)}")
    needed, there = _nbytes(name, dtype, shape), offsets[1] - offsets[0]
    if needed != there:
        raise HeaderError(f"{where}: shape {list(shape)} of {dtype} takes {needed} bytes, its place holds {there}")
    return TensorInfo(name, dtype, shape, needed, offsets[0])


def _counts(value: Any, where: str) -> tuple[int, ...]:
    """Take `value` as sizes. `type() is int`, because JSON's true is an int to Python."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise HeaderError(f"{where} must be a list of whole numbers, found {_shortened(value)}")
    if len(value) > MAX_RANK:
        raise HeaderError(f"{where} has {len(value)} entries; at most {MAX_RANK} are possible")
    if any(item > MAX_COUNT for item in value):
        raise HeaderError(f"{where} overflows 64 bits: {_shortened(value)}")
    return tuple(value)


def _check_contiguous(tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """Bring the tensors into file order. Raises HeaderError on a hole or an overlap."""
    ordered: dict[str, TensorInfo] = {}
    expected = 0
    for info in sorted(tensors, key=lambda info: (info.begin, info.begin + info.nbytes)):
        if info.begin != expected:
            kind = "leaves a hole" if info.begin > expected else "overlaps another tensor"
            raise HeaderError(f"tensor {_shortened(info.name)} {kind}: begins at {info.begin}, expected {expected}")
        ordered[info.name] = info
        expected += info.nbytes
    return ordered


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
