"""A setting needs no key here only if no value of it changes a run, or if this value is the one without a key.

Each setting of each table gets values, beside those that make it count. One of them must be carried over or listed.
A setting of which no value may do so names the line of its program that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flame_train.config import conversion as convert_module
from flame_train.config.conversion import Conversion, convert
from flame_train.config.foreign.recognize import PROGRAMS
from flame_train.config.foreign.table import Program, Row, Setting, Source

from .away import AWAY

VALUES: tuple[Any, ...] = (True, False, 3, 0.25, 0, "zz", "0.25", ["zz"])


def outcome(program: Program, source: Source) -> tuple[Any, ...]:
    """What is carried over and what is listed, without settings that have no meaning at all."""
    found: Conversion = convert(program, source)
    listed = [(each.setting, each.reason) for each in found.dropped if "no meaning" not in each.reason]
    carried = {path: each.value for path, each in found.values.items()}
    return carried, [{path: each.value for path, each in one.items()} for one in found.sets], listed


def source_of(family: str, settings: dict[str, Any], own: dict[str, Any] | None) -> Source:
    def written(values: dict[str, Any]) -> dict[str, Setting]:
        return {name: Setting(value, "f:1") for name, value in values.items()}

    return Source(family, written({"some": 1} | settings), [] if own is None else [written(own)])


def counts(program: Program, row: Row, of_set: bool) -> bool:
    """Whether a value of the row's setting changes what is carried over or listed, for one of its families."""
    name = row.key.replace("*", "zz")
    given, beside = AWAY.get(program.name, {}).get(f"{'set.' * of_set}{row.key}", (None, {}))
    for family in row.families or ("sdxl", "flux", "sd3", "wan"):
        for own in ({"zz": 1} | beside,) if of_set else (None, beside):
            before = outcome(program, source_of(family, beside, own))
            for value in VALUES if given is None else (given,):
                more = {name: value}
                trial = (
                    source_of(family, beside, (own or {}) | more) if of_set else source_of(family, beside | more, own)
                )
                if outcome(program, trial) != before:
                    return True
    return False


def rows(program: Program) -> Iterator[tuple[Row, bool]]:
    """The rows that are about one setting, and whether it is one of a set of images."""
    for of_set in (False, True):
        for row in program.table().set_rows if of_set else program.table().rows:
            if not row.key.startswith("("):
                yield row, of_set


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_setting_that_matters_is_carried_over_or_listed(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_module, "problems_in", lambda tree: [])  # the schema's word takes most of the time
    own = {f"{'set.' * of_set}{row.key}": (row, of_set) for row, of_set in rows(program)}
    silent = {name for name, (row, of_set) in own.items() if not row.inert and not counts(program, row, of_set)}
    unproved = {name for name, (row, _) in own.items() if row.inert and not row.at}
    assert not silent, "no value of these is carried over or listed"
    if program.repository:
        assert not unproved, f"no line of {program.name} shows that no value of these counts"
