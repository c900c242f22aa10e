"""Axes of a chart: round numbers, and where values lie between them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, with ticks at round numbers."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end, and no further."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def label(self, tick: float) -> str:
        """A tick as text, with as many digits as tell it from the next."""
        if tick == 0.0:
            return "0"
        largest = max(abs(self.low), abs(self.high))
        if largest >= 1e5 or largest < 1e-3:
            mantissa, _, exponent = f"{tick:.3e}".partition("e")
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{tick:.6g}"


_LEAST: Final = 1e-300  # a shorter axis counts as none: its ticks would be no normal numbers


def axis(values: Iterable[float], count: int = 5, *, zero: bool = False, share: float = 1.0) -> Axis:
    """An axis for values, with about `count` ticks.

    Args:
        values: finite numbers.
        count: how many ticks it should have.
        zero: whether it begins at 0, if no value is below.
        share: the share of the values, the lowest, that must fit: a few peaks would flatten the rest.

    Returns:
        The axis, of some length even if all values are one.
    """
    ordered = sorted(values) or [0.0, 1.0]
    low, high = ordered[0], ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
    if zero and low > 0.0:
        low = 0.0
    if high - low < _LEAST:
        high = low + (abs(low) if abs(low) > _LEAST else 1.0)
    unit = _round_up((high - low) / count)
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    return Axis(first * unit, last * unit, tuple(i * unit for i in range(first, last + 1)))


def _round_up(value: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value * (1 - 1e-9))
