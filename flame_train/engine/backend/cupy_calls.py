"""Calls of CuPy that a run on shapes made, to be made ahead on a few elements.

CuPy compiles a kernel at the first call that needs it, which waits. What it compiles depends on the dtypes, and on how
the operands lie in memory, but not on their sizes. So the same call on tiny operands, on a thread, leaves the kernel
for the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..dtype import DType

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """How an array lies in memory, of sizes 1 and 2, with strides in elements."""

    dtype: DType
    sizes: tuple[int, ...]
    strides: Strides

    def tiny(self, xp: Any) -> Any:
        """Returns a tiny array of zeros that lies so."""
        reach = 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        memory, steps = xp.zeros(reach, self.dtype), [s * self.dtype.itemsize for s in self.strides]
        return xp.lib.stride_tricks.as_strided(memory, self.sizes, steps)


@dataclass(frozen=True, slots=True)
class CupyCall:
    """A call: a function of CuPy, or a method of its first operand, on patterns and numbers, with a dtype or None."""

    name: str
    operands: tuple[Any, ...]
    dtype: DType | None = None

    def make(self, xp: Any) -> None:
        """Makes the call on tiny operands."""
        given = [o.tiny(xp) if isinstance(o, Pattern) else o for o in self.operands]
        _CALLS.get(self.name, _ufunc)(xp, self, given)


def _ufunc(xp: Any, call: CupyCall, given: list[Any]) -> None:
    getattr(xp, call.name)(*given)


def _assigned(xp: Any, call: CupyCall, given: list[Any]) -> None:
    given[0][...] = given[1]


_CALLS: dict[str, Callable[[Any, CupyCall, list[Any]], None]] = {
    "astype": lambda _, call, given: given[0].astype(call.dtype),
    "copy": lambda _, __, given: given[0].copy(),
    "assign": _assigned,
    "full": lambda xp, call, given: xp.full(1, given[0], call.dtype),
    "arange": lambda xp, call, _: xp.arange(2, dtype=call.dtype),
    "concatenate": lambda xp, _, given: xp.concatenate(given),
}
"""What is no function of elements."""


class CupyCalls(dict[CupyCall, None]):
    """The different calls of a run, in the order of their first."""

    def note(self, name: str, operands: Sequence[Any], dtype: DType | None = None) -> None:
        """Adds a call, unless an operand is no array on the device with elements, and no number."""
        found = tuple(_operand(o) for o in operands)
        if None not in found:
            self[CupyCall(name, found, dtype)] = None


def _operand(given: Any) -> Any:
    """Returns the pattern of an array with elements, another number of a number's type; None of all else."""
    if isinstance(given, (bool, int, float, np.generic)):
        return type(given)(1)
    if isinstance(given, np.ndarray) or not getattr(given, "size", 0):
        return None
    return _pattern(given.dtype, given.shape, given.strides)


@lru_cache(maxsize=4096)
def _pattern(dtype: DType, shape: tuple[int, ...], strides: Strides) -> Pattern:
    """Returns an array's pattern: dims keep their order in memory, and are dense or apart as the array's are."""
    steps, expected, step = [0] * len(shape), dtype.itemsize, 1
    for i in sorted(range(len(shape)), key=lambda i: (abs(strides[i]), -i)):
        if shape[i] == 1 or strides[i] == 0:
            steps[i] = 0 if strides[i] == 0 else step
            continue
        if strides[i] != expected:
            step += 1  # no multiple of the next one's, so that CuPy merges the two no more than the array's
        steps[i] = step
        expected, step = strides[i] * shape[i], step * 2
    return Pattern(dtype, tuple(min(n, 2) for n in shape), tuple(steps))
