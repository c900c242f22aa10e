"""The memory of the GPU that a run may take: the section `[memory]`, and sizes as text."""

from __future__ import annotations

import re
from typing import Final

from flame_train.errors import ConfigError
from flame_train.settings import Section, field

AUTO: Final = "auto"
_UNITS: Final = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
_SIZE: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class MemorySection(Section):
    """The memory of the GPU that a run may take."""

    budget: str = field(
        "",
        'the most that the run takes of the GPU, such as "12 GiB"; the plan then chooses what the config leaves open; '
        "auto: what is free; empty: no limit, and nothing is chosen",
        free=True,  # what was chosen for it is in the run folder's config
        aka=("memory", "vram", "max_vram", "gpu_memory_limit"),
    )


def bytes_of(size: str) -> int:
    """Returns the bytes of a size such as "12 GiB", "12.5GiB" or "12 GB", which are 12 * 10^9.

    Raises ConfigError, without the key, for another text and for one that is not above 0.
    """
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigError(f'expected a size such as "12 GiB", or "auto", got "{size}"')
    number, unit = match.groups()
    if not unit:
        raise ConfigError(f'expected a size with its unit, got "{size}": say "{number} GiB" (1 GiB is 1.07 GB)')
    known = {name.lower(): name for name in _UNITS}
    if unit.lower() not in known:
        raise ConfigError(f'expected one of {", ".join(_UNITS)} behind the number, got "{size}"')
    if float(number) <= 0:
        raise ConfigError(f'expected a size above 0, or "" for no limit, got "{size}"')
    return int(float(number) * _UNITS[known[unit.lower()]])


def budget_problem(budget: str) -> str | None:
    """Says what is wrong with `memory.budget`; None if nothing is."""
    if budget in ("", AUTO):
        return None
    try:
        bytes_of(budget)
    except ConfigError as error:
        return str(error)
    return None
