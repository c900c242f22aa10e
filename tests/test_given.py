"""Values that anybody may have written: whatever stands there, a reader gets its type within bounds, or nothing."""

from __future__ import annotations

import json
import math
import tomllib

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from flame_train.config.render import toml_value
from flame_train.io import json_values as given

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, math.inf, math.nan])
TEXTS = st.text(st.characters(exclude_categories=())) | st.just("\ud800")
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@drawn(VALUES)
def test_every_value_is_read_as_its_type_within_bounds_or_as_nothing(value):
    found, count = given.number(value), given.whole(value)
    assert found is None or math.isfinite(found * found)
    assert count is None or 0 <= count < 2**63
    assert given.text(value).encode() is not None
    assert all(isinstance(row, dict) for row in given.rows(value))
    json.dumps([found, count, given.text(value)], allow_nan=False)


@drawn(VALUES)
def test_json_is_read_as_json_reads_it(value):
    raw = json.dumps(value)
    assert repr(given.json_tree(raw)) == repr(json.loads(raw))
    assert repr(given.json_tree(raw.encode())) == repr(json.loads(raw))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'"' + b"\\" * 9999, "[" * 17 + "]" * 17],
)
def test_json_without_sense_is_nothing(raw):
    assert given.json_tree(raw) is None


def test_brackets_in_texts_are_no_nesting():
    assert given.json_tree(json.dumps(["[" * 99, '"{' * 99])) == ["[" * 99, '"{' * 99]
    quotes = {"a": '"', "b": "'", "c": '"""', "d": "'''"}
    texts = "".join(f"{name} = {quote}{'[{.' * 40}{quote}\n" for name, quote in quotes.items())
    assert given.toml_tree(f"{texts} # {'[' * 40}\n")["d"] == "[{." * 40


KEYS = st.text("ab.\"'[]{}=#\n\\ \ud800", max_size=4)
TREES = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.dates() | st.datetimes() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@drawn(TREES.filter(lambda tree: "\ud800" not in repr(tree) and "\\ud800" not in repr(tree)))
def test_what_is_written_as_toml_is_read_back(tree):
    assert tomllib.loads(f"v = {toml_value(tree)}") == {"v": tree}
    assert given.toml_tree(f"v = {toml_value(tree)}") == {"v": tree}


def test_a_number_too_long_for_decimals_is_refused_in_every_base():
    for digits in ("9" * 5000, "0x" + "f" * 5000, "[{a = 0o" + "7" * 5000 + "}]"):
        with pytest.raises(ValueError, match="digits"):
            given.toml_tree(f"v = {digits}")


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 20_000) + " = 1",
        "[" + ".".join("a" * 20_000) + "]",
        '"a".' * 20_000 + "b = 1",
        "a = " + "[" * 20_000,
        "a = " + "{b = " * 20_000,
    ],
)
def test_toml_that_takes_long_is_refused_before_it_is_parsed(text):
    with pytest.raises(given.TooDeep):
        given.toml_tree(text)
