"""The bounds of an optimizer's numbers: with a number outside them it would silently train to the wrong place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def check(
    where: str, *, least: float = 0.0, above: float | None = None, below: float | None = math.inf, **numbers: Any
) -> None:
    """Raises ValueError, naming it, for a number that is NaN or out of bounds, TypeError for what is no number.

    A number must be at least `least`, or greater than `above` if that is given; and less than `below` unless that is
    None.
    """
    for name, value in numbers.items():
        if not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"{where}: expected a number for {name}, got {value!r}")
        if not (least <= value if above is None else above < value) or not (below is None or value < below):
            lower = f"of at least {least:g}" if above is None else f"above {above:g}"
            upper = "" if below is None else " and below infinity" if below == math.inf else f" and below {below:g}"
            raise ValueError(f"{where}: expected {name} {lower}{upper}, got {value}")
