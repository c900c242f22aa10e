"""Sizes of a memory budget as text, and what is wrong with others."""

from __future__ import annotations

from typing import Any

import pytest

from flame_train.commands.parameters import memory_budget
from flame_train.config.load import load_located
from flame_train.config.training_sections import budget_problem, bytes_of
from flame_train.errors import ConfigError


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("12 GiB", 12 * 1024**3),
        ("12GiB", 12 * 1024**3),
        (" 7.5 gib ", 7.5 * 1024**3),
        ("12 GB", 12_000_000_000),
        ("11500 MiB", 11_500 * 1024**2),
        ("800 MB", 800_000_000),
    ],
)
def test_a_size_has_the_bytes_of_its_unit(size: str, expected: float) -> None:
    assert bytes_of(size) == int(expected)
    assert budget_problem(size) is None


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ("12", 'expected a size with its unit, got "12": say "12 GiB" (1 GiB is 1.07 GB)'),
        ("12 TB", "expected one of GiB, MiB, GB, MB behind the number"),
        ("-3 GiB", "expected a size above 0"),
        ("0 GiB", "expected a size above 0"),
        ("all", 'expected a size such as "12 GiB", or "auto", got "all"'),
        ("12 GiB 3", "expected a size such as"),
        ("1e3 GiB", "expected a size such as"),
    ],
)
def test_other_texts_are_refused_with_what_is_meant(size: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        bytes_of(size)
    assert told in str(error.value)
    assert budget_problem(size) == str(error.value)


@pytest.mark.parametrize("none", ["", "auto"])
def test_no_limit_and_what_is_free_are_no_sizes(none: str) -> None:
    assert budget_problem(none) is None


def test_the_report_of_a_config_has_a_wrong_budget_with_its_place() -> None:
    sections: dict[str, Any] = {"model": {"checkpoint": "m"}, "data": {"path": "d"}, "output": {"dir": "o"}}
    with pytest.raises(ConfigError, match=r"--set: memory\.budget: expected a size with its unit"):
        load_located(sections, ["memory.budget=12"])
    with pytest.raises(ConfigError, match=r"memory\.budget: expected a string, got 12"):
        load_located({**sections, "memory": {"budget": 12}})


@pytest.mark.parametrize(
    ("option", "budget"),
    [("12", "12 GiB"), ("7.5", "7.5 GiB"), ("-1", "-1 GiB"), ("12 GB", "12 GB"), ("auto", "auto"), (None, None)],
)
def test_the_option_counts_gibibytes(option: str | None, budget: str | None) -> None:
    assert memory_budget(option) == budget
