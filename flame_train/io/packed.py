"""Weights that programs packed in fewer bits, each in several stored tensors: read as the numbers they stand for.

Nothing is unpacked before it is read, and a tensor is unpacked by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from flame_train.errors import ModelFileError, shown
from flame_train.io.dtypes import Array
from flame_train.io.header import TensorInfo
from flame_train.io.weight_files import Kept, Weights

Shape = tuple[int, ...]
_LONGEST: Final = 1 << 20  # bytes of a text that is a tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor that several stored ones make.

    Attributes:
        names: the stored tensors that `unpack` gets.
        tag: the format's name, where a plain tensor has its dtype.
        shape: the shape of the tensor when it is unpacked.
        unpack: makes the tensor of the arrays of `names`.
        beside: stored tensors of it that play no part here.
        kept: says what they are, if their bytes may be kept.
    """

    names: tuple[str, ...]
    tag: str
    shape: Shape
    unpack: Callable[[Sequence[Array]], Array]
    beside: tuple[str, ...] = ()
    kept: Callable[[Sequence[Array]], Kept] | None = None


class Unpacked:
    """Open weights with `packed` tensors (by the name of each) in place of the stored ones that they are made of."""

    def __init__(self, stored: Weights, packed: Mapping[str, Packed]) -> None:
        self._stored, self._packed = stored, packed
        self.path: Path = stored.path
        self.files: tuple[Path, ...] = stored.files
        self.metadata: Mapping[str, str] = stored.metadata
        hidden = {name for one in packed.values() for name in (*one.names, *one.beside)} - packed.keys()
        self.names: tuple[str, ...] = tuple(name for name in stored.names if name not in hidden)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: self.info(name).shape for name in self.names}

    def info(self, name: str) -> TensorInfo:
        packed = self._packed.get(name)
        if packed is None:
            return self._stored.info(name)
        nbytes = sum(self._stored.info(part).nbytes for part in packed.names)
        return TensorInfo(name, packed.tag, packed.shape, nbytes)

    def read(self, name: str) -> Array:
        packed = self._packed.get(name)
        if packed is None:
            return self._stored.read(name)
        with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are refused where a network takes weights
            tensor = packed.unpack([self._stored.read(part) for part in packed.names])
        tensor.flags.writeable = False
        return tensor

    def stored(self, name: str) -> tuple[Array, ...]:
        packed = self._packed.get(name)
        return tuple(self._stored.read(part) for part in (packed.names if packed else (name,)))

    def as_kept(self, name: str) -> Kept | None:
        packed = self._packed.get(name)
        if packed is None or packed.kept is None:
            return None
        return packed.kept([self._stored.read(part) for part in packed.names])

    def close(self) -> None:
        self._stored.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def said_in(weights: Weights, name: str) -> bytes:
    """Returns the text that a stored tensor is. Raises ModelFileError for a long one."""
    if weights.info(name).nbytes > _LONGEST:
        raise refuse(weights.path, name, f"expected a text of at most {_LONGEST} bytes")
    return np.asarray(weights.read(name)).reshape(-1).view(np.uint8).tobytes()


def refuse(path: Path, name: str, reason: str) -> ModelFileError:
    """Returns the error for a packed tensor whose stored parts do not belong together."""
    message = f"{path}: {shown(name)}: {shown(reason)}"
    return ModelFileError(f"{message}; the file is damaged or of another format: get another copy")
