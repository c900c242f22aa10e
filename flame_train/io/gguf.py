"""GGUF files as city96's ComfyUI-GGUF writes them for diffusion models, and llama.cpp for T5.

The package `gguf`, whose authors define the format, parses the file and gives the blocks' numbers back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import ml_dtypes
import numpy as np

from flame_train.errors import EnvironmentFault, ModelFileError
from flame_train.io.dtypes import Array
from flame_train.io.header import MAX_TENSORS, TensorInfo
from flame_train.io.sniff import GGUF_MAGIC

_ORIGINAL_SHAPE: Final = "comfy.gguf.orig_shape."  # of tensors whose rows were too short for blocks
_PLAIN: Final = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


_DAMAGE: Final = (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError)  # what the parser raises


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
            reader = self._library.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._infos = {name: _info(reader, tensor) for name, tensor in self._tensors.items()}
            self.metadata: Mapping[str, str] = MappingProxyType(_metadata(reader))
        except _DAMAGE as error:
            raise ModelFileError(
                f"{path}: is damaged, or no GGUF file of version 2 or 3 ({error}); download it again"
            ) from None
        if len(self._tensors) > MAX_TENSORS or reader.byte_order != "I":
            raise ModelFileError(f"{path}: holds over {MAX_TENSORS} tensors, or is written for another processor")
        self._check_types()
        self.names: tuple[str, ...] = tuple(self._tensors)

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
            made = self._library.quants.dequantize(raw, self._tensors[name].tensor_type)
        found: Array = made.reshape(info.shape)
        found.flags.writeable = False
        return found

    def stored(self, name: str) -> tuple[Array, ...]:
        """The tensor's blocks as bytes."""
        self.info(name)
        return (self._tensors[name].data,)

    def nf4(self, name: str) -> None:
        """None: no format of these files is that."""

    def close(self) -> None:
        """Lets go of the map."""
        self._tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_types(self) -> None:
        for name, tensor in self._tensors.items():
            tag = tensor.tensor_type.name
            if tag not in _PLAIN and tensor.tensor_type not in self._library.quants._type_traits:
                raise ModelFileError(
                    f"{self.path}: {name} is stored as {tag}, which is not read; "
                    "get the model as Q8_0, Q6_K, Q5_K, Q4_K, Q4_0 or safetensors"
                )


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


def _info(reader: Any, tensor: Any) -> TensorInfo:
    """The type, the shape as PyTorch has it (the format counts dims from the last one) and the bytes of a tensor."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    field = reader.get_field(_ORIGINAL_SHAPE + tensor.name)
    original = shape if field is None else tuple(int(field.parts[i][0]) for i in field.data)
    if math.prod(original) != math.prod(shape):
        raise ValueError(f"{tensor.name} of shape {shape} was said to be {original}")
    return TensorInfo(tensor.name, tensor.tensor_type.name, original, tensor.data.nbytes)


def _metadata(reader: Any) -> dict[str, str]:
    """Short texts and numbers of the header."""
    found = {}
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "tokenizer.", _ORIGINAL_SHAPE)):
            continue
        content = field.contents()
        if isinstance(content, str | int | float | bool):
            found[key] = str(content)
    return found
