"""Open weights: what they can do, and several of them read as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

from flame_train.errors import ModelFileError
from flame_train.io.dtypes import Array
from flame_train.io.header import TensorInfo


@dataclass(frozen=True, slots=True, eq=False)
class StoredNf4:
    """A tensor in 4 bits, doubly quantized, as a file has it.

    Attributes:
        data: uint8, two elements a byte, the first in the upper half: places in `codes`.
        magnitudes: uint8, of each `block` of elements a place in `outer_codes`.
        codes: the 16 numbers of an element, fp32.
        outer: of each `outer_block` of magnitudes their largest, fp32.
        outer_codes: the 256 numbers of a magnitude, fp32.
        block, outer_block: how many share one.
        offset: what is added to a magnitude.
    """

    data: Array
    magnitudes: Array
    codes: Array
    outer: Array
    outer_codes: Array
    block: int
    outer_block: int
    offset: float


@dataclass(frozen=True, slots=True, eq=False)
class StoredInt8:
    """A matrix in whole numbers with a factor for each row, as a file has it.

    Attributes:
        data: int8 (out, in).
        factors: fp32 (out,).
        rotated: columns that were rotated together before they were rounded (ConvRot); 0: none.
    """

    data: Array
    factors: Array
    rotated: int


Kept = StoredNf4 | StoredInt8
"""A tensor whose bytes may be kept as a file has them."""


class Weights(Protocol):
    """Named tensors that are read one at a time. Closed by leaving the `with` block."""

    @property
    def path(self) -> Path: ...
    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files that hold the tensors."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of everything, from headers alone. With `read` it makes this what `nn.load` takes."""

    def info(self, name: str) -> TensorInfo:
        """Returns dtype tag, shape and bytes of a tensor. Raises ModelFileError if there is none."""

    def read(self, name: str) -> Array:
        """Returns the tensor, read-only: a view of its bytes on disk, or the numbers that packed ones stand for."""

    def stored(self, name: str) -> tuple[Array, ...]:
        """Gives the arrays on disk of which `read` makes the tensor: what tells it from another, still packed."""

    def as_kept(self, name: str) -> Kept | None:
        """Gives the tensor in doubly quantized NF4 or int8 by rows, packed; None if it is stored otherwise."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


class ShardedWeights:
    """Several files read as one: each name's file, and its name there."""

    def __init__(self, path: Path, parts: Sequence[Weights], home: Mapping[str, tuple[Weights, str]]) -> None:
        self.path = path
        self._parts = tuple(parts)
        self._home = home
        self.names: tuple[str, ...] = tuple(home)
        self.files: tuple[Path, ...] = tuple(file for part in parts for file in part.files)
        metadata = {key: value for part in parts for key, value in part.metadata.items()}
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.info(name).shape for name in self.names}

    def info(self, name: str) -> TensorInfo:
        part, own_name = self._find(name)
        stored = part.info(own_name)
        return TensorInfo(name, stored.dtype, stored.shape, stored.nbytes, stored.begin)

    def read(self, name: str) -> Array:
        part, own_name = self._find(name)
        return part.read(own_name)

    def stored(self, name: str) -> tuple[Array, ...]:
        part, own_name = self._find(name)
        return part.stored(own_name)

    def as_kept(self, name: str) -> Kept | None:
        part, own_name = self._find(name)
        return part.as_kept(own_name)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[Weights, str]:
        if name not in self._home:
            raise ModelFileError(f"{self.path}: holds no tensor {name!r} (it holds {len(self.names)} others)")
        return self._home[name]
