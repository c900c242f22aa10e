"""Text of different lengths: kept without padding, and filled up where examples become a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Padding:
    """How an array of text, a row a token, is filled up with rows of zeros in a batch.

    Attributes:
        most: the rows of the longest text.
        multiple: of this the rows of a batch are a multiple, unless they are `most`. A step is captured for each
            number of rows that comes, so a larger one makes fewer captures.
        rows: the name of an array (B,) int32 that says how many rows of each example are its own; empty: none.
    """

    most: int
    multiple: int
    rows: str = ""

    def length(self, longest: int) -> int:
        """Returns the rows in a batch whose longest text has `longest`."""
        return min(self.most, self.multiple * max(1, -(-longest // self.multiple)))


Paddings = Mapping[str, Padding]
"""How arrays are filled up, by name; arrays of other names have one shape in a batch."""

NO_PADDINGS: Final[Paddings] = MappingProxyType({})


def collate(examples: Sequence[Arrays], paddings: Paddings = NO_PADDINGS) -> dict[str, Array]:
    """Examples as a batch: arrays (B, ...) by name, those that `paddings` name filled up to one number of rows."""
    batch: dict[str, Array] = {}
    for name in examples[0]:
        arrays, padding = [example[name] for example in examples], paddings.get(name)
        if padding is None:
            batch[name] = np.stack(arrays)
            continue
        batch[name] = np.stack([_filled(a, padding.length(max(map(len, arrays)))) for a in arrays])
        if padding.rows:
            batch[padding.rows] = np.array([len(a) for a in arrays], np.int32)
    return batch


def _filled(array: Array, rows: int) -> Array:
    """Returns `array` (T, ...) with zeros behind it, (rows, ...)."""
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])
