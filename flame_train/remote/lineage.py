"""Whether two logs are of one run: the steps that both have must have the same figures."""

from __future__ import annotations

from typing import Any, Final

from flame_train.io.runlog import record_of

_FIGURES: Final = ("loss", "lr", "grad_norm", "loss_scale")
"""What a step computes; its times and memory may differ."""


def apart(one: bytes, other: bytes, last: int) -> int | None:
    """The first step up to `last` whose figures differ in two logs; None if there is none. Lines may be missing."""
    theirs = _figures(other)
    return next((step for step, mine in _figures(one).items() if step <= last and theirs.get(step, mine) != mine), None)


def _figures(log: bytes) -> dict[int, tuple[Any, ...]]:
    found = dict[int, tuple[Any, ...]]()
    for line in log.splitlines():
        if record := record_of(line):
            found[record["step"]] = tuple(record.get(name) for name in _FIGURES)
    return found
