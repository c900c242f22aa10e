"""GGUF files as city96's ComfyUI-GGUF writes them for diffusion models, and llama.cpp for T5.

The package `gguf`, whose authors define the format, gives the blocks' numbers back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import ml_dtypes
import numpy as np

from flame_train.errors import EnvironmentFault, ModelFileError, shown
from flame_train.io.dtypes import Array
from flame_train.io.gguf_header import GgufHeader, GgufTensor, read_header
from flame_train.io.header import TensorInfo
from flame_train.io.sniff import GGUF_MAGIC

_PLAIN: Final = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does."""
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
        """The type's name, the unpacked shape and the stored bytes. Raises ModelFileError if there is none."""
        if name not in self._infos:
            raise ModelFileError(f"{self.path}: holds no tensor {name!r} (it holds {len(self.names)} others)")
        return self._infos[name]

    def read(self, name: str) -> Array:
        """The tensor's numbers. Blocks are given back in fp32, exactly as the package's own functions do."""
        info, (raw,) = self.info(name), self.stored(name)
        if info.dtype in _PLAIN:
            made = raw.reshape(-1).view(np.uint8).view(_PLAIN[info.dtype])
        else:
            made = self._library.quants.dequantize(raw, self._kinds[name])
        found: Array = made.reshape(info.shape)
        found.flags.writeable = False
        return found

    def stored(self, name: str) -> tuple[Array, ...]:
        """The tensor's blocks as bytes."""
        self.info(name)
        return (self._stored[name],)

    def nf4(self, name: str) -> None:
        """None: no format of these files is that."""

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
        """The tensor's bytes in rows; those of floats that NumPy knows as such floats."""
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
        """The type, the shape, which may have been another before it was packed, and the bytes of a tensor."""
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
    """Texts and numbers of the header."""
    return {key: str(value) for key, value in header.values.items() if not key.startswith("tokenizer.")}
