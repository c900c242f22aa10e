"""A key of a choice that is not made is an error, but for the defaults that `init --full` writes."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from flame_train.config.keys import Key, keys
from flame_train.config.load import problems_in
from flame_train.tools.init import template

_OF_ANOTHER = "remove this key or change that one"


def full() -> dict[str, dict[str, Any]]:
    """The sections of a file that `init --full` writes."""
    tree = tomllib.loads(template("sdxl", full=True))
    return {name: table for name, table in tree.items() if isinstance(table, dict)}


def chosen() -> list[tuple[Key, str | int]]:
    """Each value of each key that other keys belong to."""
    with_keys = {path for key in keys().values() for path in key.only}
    return [(key, choice) for key in keys().values() if key.path in with_keys for choice in key.choices]


def of_another(tree: dict[str, dict[str, Any]]) -> list[str]:
    return [problem.key for problem in problems_in(tree) if _OF_ANOTHER in problem.message]


def test_a_full_file_stays_valid_where_one_choice_is_changed() -> None:
    tree = full()
    assert len(chosen()) > 20
    for key, choice in chosen():
        section = tree[key.section] | {key.name: choice}
        assert of_another(tree | {key.section: section}) == [], f"{key.path} = {choice}"


def test_another_value_is_an_error() -> None:
    tree = full()
    tree["optimizer"] |= {"name": "lion", "eps": 1e-6}
    tree["loss"] |= {"timestep_sampling": "uniform", "beta_a": 0.9}
    assert of_another(tree) == ["optimizer.eps", "loss.beta_a"]


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.95], ids=["as sgd's", "of none", "as muon's"])
def test_a_key_of_another_choice_is_an_error_with_that_choices_default_too(momentum: float) -> None:
    tree = full()
    tree["optimizer"] |= {"name": "lion", "momentum": momentum}
    assert of_another(tree) == ["optimizer.momentum"]
