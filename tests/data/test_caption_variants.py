"""Texts of a pool: what is kept, what moves, and that the same captions give the same pool."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame_train.data.caption_variants import CaptionKeys, expand
from flame_train.errors import DataError

TAGS = st.lists(st.text("abcxyz ", min_size=1, max_size=5).map(str.strip).filter(bool), min_size=1, max_size=9)


@given(st.text(max_size=60))
def test_without_tools_a_caption_is_what_was_written(caption: str) -> None:
    assert CaptionKeys().texts([caption]) == (caption,)


@given(TAGS, st.integers(0, 4))
def test_shuffling_keeps_all_tags_and_the_first_in_place(tags: list[str], kept: int) -> None:
    for text in CaptionKeys(shuffle=True, keep_tokens=kept).texts([", ".join(tags)]):
        found = text.split(", ")
        assert found[:kept] == tags[:kept]
        assert sorted(found) == sorted(tags)


def test_a_pool_has_as_many_texts_as_asked_for_and_is_the_same_again() -> None:
    keys = CaptionKeys(shuffle=True, variants=6)
    pool = keys.texts(["a, b, c, d, e, f, g"])
    assert len(pool) == len(set(pool)) == 6
    assert keys.texts(["a, b, c, d, e, f, g"]) == pool
    assert keys.texts(["a, b, c, d, e, f, h"]) != pool


def test_every_order_comes_equally_often() -> None:
    pool = CaptionKeys(shuffle=True, variants=10_000)
    seen = set(pool.texts(["a, b, c, d"]))
    assert seen == {", ".join(order) for order in itertools.permutations("abcd")}


def test_what_stands_before_and_after_a_separator_of_its_own_keeps_its_place() -> None:
    keys = CaptionKeys(shuffle=True, keep_separator="|||")
    for text in keys.texts(["one, two ||| a, b, c, d ||| last"]):
        assert text.startswith("one, two, ")
        assert text.endswith(", last")
        assert "|" not in text


def test_another_separator_is_put_back() -> None:
    assert {t.count(";") for t in CaptionKeys(shuffle=True, separator=";").texts(["a, b; c; d"])} == {2}


def test_dropped_tags_are_as_many_as_said_and_never_protected_ones() -> None:
    tags = [f"t{i}" for i in range(50)]
    keys = CaptionKeys(tag_dropout=0.3, protected=("t7", "t9"), keep_tokens=2, variants=200)
    pool = keys.texts([", ".join(tags)])
    left = [text.split(", ") for text in pool]
    assert abs(sum(map(len, left)) / len(left) / 50 - 0.712) < 0.02  # 46 of 50 may go
    assert all({"t0", "t1", "t7", "t9"} <= set(found) for found in left)
    assert all(found == [tag for tag in tags if tag in found] for found in left)


def test_a_trigger_replaces_its_place_or_comes_first() -> None:
    keys = CaptionKeys(trigger="sks dog", prefix="photo,", suffix="4k")
    assert keys.texts(["a [trigger] runs"]) == ("photo, a sks dog runs 4k",)
    assert keys.texts(["it runs"]) == ("photo, sks dog it runs 4k",)
    assert keys.texts(["sks dog sits"]) == ("photo, sks dog sits 4k",)
    assert keys.texts([""]) == ("photo, sks dog 4k",)


def test_wildcards_choose_every_part_and_nest() -> None:
    pool = CaptionKeys(wildcards=True, variants=200).texts(["a {red|{dark|light} blue|} cat, {{x}}"])
    assert set(pool) == {f"a {colour} cat, {{x}}" for colour in ("red", "dark blue", "light blue", "")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a {red|blue cat", "begins at character 3 does not close"),
        ("a red} cat", "ends at character 6 and none began"),
        ("{" * 30 + "}" * 30, None),
        ("{a" * 30 + "}" * 30, "nested more than 20 deep"),
    ],
)
def test_a_wrong_wildcard_is_told(text: str, said: str | None) -> None:
    if said is None:
        assert expand(text, itertools.repeat(0.0)) == "{" * 15 + "}" * 15
        return
    with pytest.raises(DataError, match=said):
        expand(text, itertools.repeat(0.0))


def test_several_captions_are_all_in_the_pool() -> None:
    assert CaptionKeys().texts(["one", "two", "one"]) == ("one", "two")
    assert CaptionKeys(variants=1).texts(["one", "two"]) == ("one",)
    pool = CaptionKeys(shuffle=True, variants=40).texts(["a, b", "c, d"])
    assert set(pool) == {"a, b", "b, a", "c, d", "d, c"}
