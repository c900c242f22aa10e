"""A text's token ids in a fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A text as an encoder's input."""

    ids: np.ndarray[Any, Any]  # int32 (length,): tokens, then padding
    mask: np.ndarray[Any, Any]  # bool (length,): True where there is a token
    truncated: int  # how many tokens did not fit

    @classmethod
    def of(cls, ids: Sequence[int], length: int, pad: int, end: Sequence[int] = ()) -> Self:
        """Cuts `ids` so that `end` fits behind them, and pads. Raises ValueError for a length without room."""
        least = max(1, len(end))
        if length < least:
            raise ValueError(f"expected a length of at least {least}, got {length}")
        fitting = [*ids[: length - len(end)], *end]
        row = np.full(length, pad, np.int32)
        row[: len(fitting)] = fitting
        return cls(row, np.arange(length) < len(fitting), len(ids) + len(end) - len(fitting))
