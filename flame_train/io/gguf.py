"""GGUF files as city96's ComfyUI-GGUF writes them for diffusion models, and llama.cpp for T5.

The package `gguf`, whose authors define the format, gives the blocks' numbers back.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import ml_dtypes
import numpy as np

from flame_train.errors import EnvironmentFault, ModelFileError, shown
from flame_train.io.dtypes import Array
from flame_train.io.foreign_files import GGUF_MAGIC
from flame_train.io.header import MAX_NAME, MAX_RANK, MAX_TENSORS, TensorInfo

_PLAIN: Final = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def is_gguf(path: Path) -> bool:
    """Tells whether the file begins as a GGUF file does."""
    if not path.is_file():
        return False
    with open(path, "rb") as stream:
        return stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC


class GgufFile:
    """A GGUF file with a checked table of tensors, each given back in fp32, or as it is if it is a plain float.

    A context manager. Raises ModelFileError for a file that is damaged or holds a type that is not read, and
    EnvironmentFault without the package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        self._library = _library(path)
        try:
            data = np.memmap(path, np.uint8, "r")
            header = read_header(data)
            self._kinds = {tensor.name: self._kind(tensor) for tensor in header.tensors}
            self._stored = {tensor.name: self._data(data, tensor) for tensor in header.tensors}
            self._infos = {tensor.name: self._info(tensor, header) for tensor in header.tensors}
            self._refuse_overlaps(header.tensors)
        except ValueError as error:
            raise ModelFileError(
                f"{path}: is damaged, or no GGUF file of version 2 or 3 ({shown(error)}); download it again"
            ) from None
        self.metadata: Mapping[str, str] = MappingProxyType(_metadata(header))
        self.names: tuple[str, ...] = tuple(self._infos)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._infos.items()}

    def info(self, name: str) -> TensorInfo:
        """Returns the type's name, the unpacked shape and the stored bytes. Raises ModelFileError if there is none."""
        if name not in self._infos:
            raise ModelFileError(f"{self.path}: holds no tensor {name!r} (it holds {len(self.names)} others)")
        return self._infos[name]

    def read(self, name: str) -> Array:
        """Returns the tensor's numbers. Blocks are given back in fp32, exactly as the package's own functions do."""
        info, (raw,) = self.info(name), self.stored(name)
        if info.dtype in _PLAIN:
            values = raw.reshape(-1).view(np.uint8).view(_PLAIN[info.dtype])
        else:
            values = self._library.quants.dequantize(raw, self._kinds[name])
        tensor: Array = values.reshape(info.shape)
        tensor.flags.writeable = False
        return tensor

    def stored(self, name: str) -> tuple[Array, ...]:
        """Returns the tensor's blocks as bytes."""
        self.info(name)
        return (self._stored[name],)

    def as_kept(self, name: str) -> None:
        """Returns None: no format of these files is that."""

    def close(self) -> None:
        """Lets go of the map."""
        self._stored = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _kind(self, tensor: GgufTensor) -> Any:
        try:
            kind = self._library.GGMLQuantizationType(tensor.kind)
        except ValueError:
            raise ValueError(f"{tensor.name} is of the unknown type {tensor.kind}") from None
        if kind.name not in _PLAIN and kind not in self._library.quants._type_traits:
            raise ModelFileError(
                f"{self.path}: {shown(tensor.name)} is stored as {kind.name}, which is not read; "
                "get the model as Q8_0, Q6_K, Q5_K, Q4_K, Q4_0 or safetensors"
            )
        return kind

    def _data(self, data: Array, tensor: GgufTensor) -> Array:
        """Returns the tensor's bytes in rows; those of floats that NumPy knows as such floats."""
        kind = self._kinds[tensor.name]
        block, size = self._library.GGML_QUANT_SIZES[kind]
        *rows, columns = tensor.shape or (1,)
        if columns % block:
            raise ValueError(f"{tensor.name} has rows of {columns} numbers, which blocks of {block} do not fill")
        shape = (*rows, columns // block * size)
        end = tensor.begin + math.prod(shape)
        if end > data.size:
            raise ValueError(f"{tensor.name} would end at {end}, and the file has {data.size} bytes")
        stored = data[tensor.begin : end]
        if kind.name in _PLAIN and kind.name != "BF16":
            return stored.view(_PLAIN[kind.name]).reshape(tensor.shape)
        return stored.reshape(shape)

    def _info(self, tensor: GgufTensor, header: GgufHeader) -> TensorInfo:
        """Returns the type, the shape, which may have been another before it was packed, and the bytes of a tensor."""
        shape = header.shapes.get(tensor.name, tensor.shape)
        if math.prod(shape) != math.prod(tensor.shape) or min(shape, default=0) < 0:
            raise ValueError(f"{tensor.name} of shape {tensor.shape} was said to be {shape}")
        return TensorInfo(tensor.name, self._kinds[tensor.name].name, shape, self._stored[tensor.name].nbytes)

    def _refuse_overlaps(self, tensors: Sequence[GgufTensor]) -> None:
        end = 0
        for tensor in sorted(tensors, key=lambda each: each.begin):
            if tensor.begin < end:
                raise ValueError(f"{tensor.name} overlaps another tensor")
            end = tensor.begin + self._stored[tensor.name].nbytes


def _library(path: Path) -> Any:
    try:
        import gguf
        from gguf import quants  # noqa: F401  # a part of it that it does not load by itself
    except ImportError as error:
        raise EnvironmentFault(
            f"{path}: a GGUF file is read by the package gguf, which is not here ({error}); "
            "install it: pip install 'flame-train[gguf]'"
        ) from None
    return gguf


def _metadata(header: GgufHeader) -> dict[str, str]:
    """Returns texts and numbers of the header."""
    return {key: str(value) for key, value in header.values.items() if not key.startswith("tokenizer.")}


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
    """Reads the header of a file's bytes. Raises ValueError for one that is damaged, or promises more than there is."""
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
