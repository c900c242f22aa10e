"""What an optimizer's numbers have to lie between: with others it would train to the wrong place without a word."""

from __future__ import annotations

import math


def check(
    where: str, *, least: float = 0.0, above: float | None = None, below: float | None = math.inf, **numbers: float
) -> None:
    """Raises ValueError, with its name, for a number below `least`, not `above` or not `below`; for NaN, too."""
    for name, value in numbers.items():
        if not (least <= value if above is None else above < value) or not (below is None or value < below):
            lower = f"of at least {least:g}" if above is None else f"above {above:g}"
            upper = "" if below is None else " and below infinity" if below == math.inf else f" and below {below:g}"
            raise ValueError(f"{where}: expected {name} {lower}{upper}, got {value}")
