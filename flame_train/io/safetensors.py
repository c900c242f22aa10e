"""EncoderInput and writing safetensors files: strict, memory-mapped, deterministic, and never half written."""

from __future__ import annotations

import hashlib
import math
import mmap
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.open_folder import Location, entry_at, path_of
from flame_train.errors import EnvironmentFault, ModelFileError, OutputError, of_environment
from flame_train.io.dtypes import DTYPE_OF_TAG, FLOAT_TAGS, Array, tag_of
from flame_train.io.foreign_files import describe_foreign, refused_by_suffix
from flame_train.io.header import (
    MAX_HEADER_BYTES,
    MAX_RANK,
    Header,
    HeaderError,
    TensorInfo,
    build_header,
    parse_header,
    read_header,
)
from flame_train.io.mapped_file import MappedFile

__all__ = ["SafetensorsFile", "TensorInfo", "describe", "save_file", "save_stream", "serialize"]

MAX_METADATA_VALUE: Final = 64 * 1024


_HEADERS_ALONE: Final[dict[Path, str]] = {}
"""Files of this process that end after the header, and the command that fetches each whole."""


def declare_header_alone(path: Path, download: str) -> None:
    """Declares `path` a file of which only the header was fetched: its shapes are known, not its values."""
    _HEADERS_ALONE[path] = download


class SafetensorsFile:
    """A safetensors file with a checked header; its data is mapped, and read on demand.

    A context manager. Arrays returned by `read` stay valid after it is closed: they keep the map alive. Of a file
    read through, only the last tensor's pages count as this process's memory.
    """

    def __init__(self, path: str | Path) -> None:
        """Check the header of `path`. Raises ModelFileError naming the file, the reason and the remedy."""
        self.path = Path(path)
        self.files = (self.path,)
        reason = refused_by_suffix(self.path)
        if reason is not None:
            raise ModelFileError(f"{self.path}: refused. {reason}")
        self._map: mmap.mmap | None = _map_file(self.path)
        self._alone = _HEADERS_ALONE.get(self.path)
        self._data_begin, header = _read_header(self.path, self._map, whole=self._alone is None)
        self._tensors = header.tensors
        self.names: tuple[str, ...] = tuple(header.tensors)
        self.metadata: Mapping[str, str] = MappingProxyType(header.metadata)
        self._last: tuple[int, int] | None = None  # where the tensor read last begins in the map, and its size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of everything in the file. With `read` it makes the file what `nn.load` takes."""
        return {name: info.shape for name, info in self._tensors.items()}

    def info(self, name: str) -> TensorInfo:
        """Returns the header's entry of tensor `name`. Raises ModelFileError if there is none."""
        info = self._tensors.get(name)
        if info is None:
            raise ModelFileError(f"{self.path}: holds no tensor {name!r} (it holds {len(self.names)} others)")
        return info

    def read(self, name: str) -> Array:
        """Returns tensor `name` as a read-only view of the file, in its stored dtype and shape, without a copy."""
        info = self.info(name)
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        dtype = DTYPE_OF_TAG[info.dtype].newbyteorder("<")
        count = info.nbytes // dtype.itemsize
        if count == 0:
            return _read_only(np.empty(info.shape, dtype))
        if self._alone is not None:
            return self._unknown(info, dtype)
        begin = self._data_begin + info.begin
        self._let_go(self._map)
        self._last = begin, info.nbytes
        flat: Array = np.frombuffer(self._map, dtype, count, begin)
        return flat.reshape(info.shape)

    def _unknown(self, info: TensorInfo, dtype: np.dtype[Any]) -> Array:
        """Returns NaN without memory, or 1 for one number. Raises ModelFileError for what a format needs."""
        if info.dtype not in FLOAT_TAGS:
            raise ModelFileError(
                f"{self.path.name}: {info.name} is needed, and of this file only the header was fetched; "
                f"fetch it first: {self._alone}"
            )
        return np.broadcast_to(np.array(np.nan if math.prod(info.shape) > 1 else 1.0).astype(dtype), info.shape)

    def stored(self, name: str) -> tuple[Array, ...]:
        """Returns the tensor as the only array that it is made of."""
        return (self.read(name),)

    def as_kept(self, name: str) -> None:
        """Returns None: who knows a format finds its tensors (`unpacked`)."""

    def _let_go(self, mapped: mmap.mmap) -> None:
        """Give back the pages of the tensor read last; an array that still needs them finds them in the file again."""
        if self._last is not None and hasattr(mapped, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            begin, size = self._last
            page = begin - begin % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, page, begin + size - page)

    def close(self) -> None:
        """Let go of the map; it is unmapped once no array uses it."""
        self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def describe(name: str, array: Array) -> TensorInfo:
    """Makes the header entry of `array`. Raises TypeError or ValueError for values that the format cannot hold."""
    if array.ndim > MAX_RANK:
        raise ValueError(f"{name}: {array.ndim} dimensions; at most {MAX_RANK} can be stored")
    return TensorInfo(name, tag_of(array.dtype), array.shape, array.nbytes)


def save_file(path: str | Location, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to `path`, whole or not at all; equal contents give equal bytes.

    Any strides are allowed; values are stored in C order, little-endian. Raises OutputError when the disk refuses
    (the old file then stays) or when a metadata value exceeds 64 KiB.
    """
    infos = [describe(name, array) for name, array in tensors.items()]
    save_stream(path, infos, tensors.__getitem__, metadata)


def save_stream(
    path: str | Location,
    infos: Iterable[TensorInfo],
    read: Callable[[str], Array],
    metadata: Mapping[str, str] | None = None,
    after: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Does as `save_file`, but requests each tensor once, in order, so one at a time is in memory.

    `infos` announces name, dtype tag and shape; `read(name)` must return exactly that (ValueError if not). `after` is
    as in `build_header`.
    """
    if refused_by_suffix(Path(path) if isinstance(path, str) else path_of(path)):
        raise OutputError(f"{path}: a file of this ending is taken for a pickle and never read; end it in .safetensors")
    header, placed = build_header(infos, _checked_metadata(metadata), after)
    if len(header) > MAX_HEADER_BYTES:
        raise OutputError(f"{path}: the header would take {len(header)} bytes; at most {MAX_HEADER_BYTES} allowed")
    total = len(header) + sum(info.nbytes for info in placed)
    place = Path(path) if isinstance(path, str) else path
    write_atomically(place, _chunks(header, placed, read), total)
    _require_readable(place)


def _require_readable(place: Location) -> None:
    """Open a written file with the format's library, as every other program will."""
    try:
        with entry_at(place) as target, target.folder.errors(target.path), safe_open(target.path, framework="np"):
            pass
    except SafetensorError as error:
        raise OutputError(
            f"{place}: was written, and the safetensors library refuses it ({error}); check the disk, and try again"
        ) from error


def serialize(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yields the bytes that `save_file` would write, header first, then tensor by tensor. For hashes."""
    infos = [describe(name, array) for name, array in tensors.items()]
    header, placed = build_header(infos, _checked_metadata(metadata))
    return _chunks(header, placed, tensors.__getitem__)


def hash_data(tensors: Mapping[str, Array]) -> str:
    """Returns SHA-256, in hex, of the tensors' bytes in file order, without the header."""
    digest = hashlib.sha256()
    chunks = serialize(tensors)
    next(chunks)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(header: bytes, placed: Iterable[TensorInfo], read: Callable[[str], Array]) -> Iterator[bytes | memoryview]:
    yield header
    for info in placed:
        array = read(info.name)
        if tag_of(array.dtype) != info.dtype or array.shape != info.shape:
            raise ValueError(f"{info.name}: announced {info.dtype} {info.shape}, got {array.dtype} {array.shape}")
        # order="C" keeps a 0-d array 0-d, which np.ascontiguousarray would not
        packed = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        if packed.size:
            yield packed.reshape(-1).view(np.uint8).data


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    checked = dict(metadata or {})
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map text to text, got {key!r}: {type(value).__name__}")
        size = len(value.encode("utf-8"))
        if size > MAX_METADATA_VALUE:
            raise OutputError(
                f"metadata {key!r} takes {size} bytes; at most {MAX_METADATA_VALUE} are written, "
                "because readers refuse files with very large headers. Shorten it"
            )
    return checked


def _map_file(path: Path) -> MappedFile:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: is a folder; a safetensors file was expected")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe or a device could block for ever
            raise ModelFileError(f"{path}: is not a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: {describe_foreign(b'', 0)}")
        with open(path, "rb") as stream:
            return MappedFile(path, stream.fileno())
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; check the path") from None
    except OSError as error:
        if of_environment(error):
            raise EnvironmentFault(
                f"{path}: cannot be read now: {error.strerror}; see to that and start again"
            ) from error
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_header(path: Path, mapped: Any, whole: bool) -> tuple[int, Header]:
    """Reads where the data begins, and the header. Raises ModelFileError."""
    size = len(mapped)
    head = bytes(mapped[:512])
    length = int.from_bytes(head[:8], "little")
    if size < 9 or head[8:9] != b"{" or length > size - 8:
        foreign = describe_foreign(head, size)
        if foreign is not None:
            raise ModelFileError(f"{path}: not a safetensors file. {foreign}")
    remedy = "The file is damaged or not a safetensors file; download it again"
    try:
        if size < 8:
            raise HeaderError(f"{size} bytes are too few for a header")
        if length > MAX_HEADER_BYTES:
            raise HeaderError(f"the stated header length {length} is over the limit of {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise HeaderError(f"the stated header length {length} goes past the end of the file ({size} bytes)")
        end = 8 + length
        header = read_header(path, mapped, end) if whole else parse_header(bytes(mapped[8:end]))
    except HeaderError as error:
        raise ModelFileError(f"{path}: {error}. {remedy}") from None
    if whole:
        _check_size(path, size, end + header.data_bytes)
    return end, header


def _check_size(path: Path, size: int, promised: int) -> None:
    if size < promised:
        raise ModelFileError(
            f"{path}: incomplete: its header promises {promised} bytes, the file has {size} "
            f"({100 * size / promised:.1f} %). The download was cut off; download it again"
        )
    if size > promised:
        raise ModelFileError(
            f"{path}: {size - promised} bytes follow the last tensor, where the file should end. "
            "It is damaged or hides something; download it again"
        )


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array
