"""One value of a TOML text is changed, and all else stays: beside tomllib's reading of both texts."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame_train.config.render import toml_value
from flame_train.config.toml_edit import with_value
from flame_train.errors import ConfigError

TEXT = """\
# the head
format = 1

[train]            # of the run
steps = 5          # few
list = [
  1, # one
  2,
]

[data]
[[data.sets]]
path = "a # b"
"""


def test_a_value_is_replaced_and_its_comment_stays() -> None:
    assert with_value(TEXT, "train", "steps", "70") == TEXT.replace("steps = 5 ", "steps = 70 ")
    assert with_value(TEXT, "train", "list", "[3]") == TEXT.replace("[\n  1, # one\n  2,\n]", "[3]")


def test_a_key_is_added_to_its_section_or_with_a_new_one() -> None:
    assert with_value(TEXT, "train", "seed", "3") == TEXT.replace("2,\n]\n", "2,\n]\nseed = 3\n")
    assert with_value(TEXT, "lora", "rank", "3") == TEXT + "\n[lora]\nrank = 3\n"
    assert with_value("", "lora", "rank", "3") == "[lora]\nrank = 3\n"
    assert with_value("train.steps = 5\n", "train", "steps", "6") == "train.steps = 6\n"
    assert with_value("train = {steps = 5, seed = 1}", "train", "steps", "6") == "train = {steps = 6, seed = 1}"


def test_a_key_is_removed_with_its_line() -> None:
    assert with_value(TEXT, "train", "steps", None) == TEXT.replace("steps = 5          # few\n", "")
    assert with_value(TEXT, "train", "seed", None) == TEXT


@pytest.mark.parametrize(
    ("text", "section", "name", "written"),
    [
        ("[train]\nsteps = = 1\n", "train", "steps", "1"),
        ("train = {steps = 5}", "train", "steps", None),
        ("train = {steps = 5}", "train", "seed", "1"),
        ("train = 5", "train", "steps", "1"),
        (TEXT, "data", "sets", "[]"),
        (TEXT, "train", "steps", "1\nlist = 2"),
        (TEXT, "train", "steps", "'"),
    ],
)
def test_what_cannot_be_changed_by_itself_is_refused(text: str, section: str, name: str, written: str | None) -> None:
    with pytest.raises(ConfigError, match="expected"):
        with_value(text, section, name, written)


VALUES = st.recursive(
    st.integers(-(10**9), 10**9) | st.booleans() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["a", "b", "c"])


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3), max_size=3), NAMES, NAMES, VALUES)
def test_any_value_lands_at_its_key_and_nowhere_else(tree, section, name, value) -> None:
    parts = [f"[{s}]\n" + "".join(f"{n} = {toml_value(v)} # x\n" for n, v in keys.items()) for s, keys in tree.items()]
    after = tomllib.loads(with_value("\n".join(parts), section, name, toml_value(value)))
    assert after == tree | {section: tree.get(section, {}) | {name: value}}
