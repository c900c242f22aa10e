"""The line index against tomllib: the same keys, each on the line where its name stands."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame_train.config.toml_lines import key_lines

TEXT = '''# a comment with [brackets] = "and = signs"
top = 1
"quoted key" = """
line = 'not a key'
still \\""" inside""""
[alpha]
one = "a # not a comment"   # a comment
two.three = 'C:\\path'
two . "four" = [ 1, 2, # here
  "five = 5", [ "]" ],
  { six = 6 },
]
inline = { seven = 7, eight.nine = { ten = 10 } }
[ beta . gamma ]
date = 1979-05-27 07:32:00
raw = \'\'\'
[delta]
\'\'\'
last = -1e-4
[[points]]
x = 1
[[points]]
y = 2
'''


def paths(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Every key, and every item of a list by its number."""
    found = set()
    for name, value in tree.items():
        found |= {(*prefix, name), *below(value, (*prefix, name))}
    return found


def below(value: Any, path: tuple[str, ...]) -> set[tuple[str, ...]]:
    if isinstance(value, dict):
        return paths(value, path)
    found = set()
    for i, item in enumerate(value if isinstance(value, list) else []):
        found |= {(*path, f"[{i}]"), *below(item, (*path, f"[{i}]"))}
    return found


def test_every_key_of_a_hard_text_has_its_line() -> None:
    lines = key_lines(TEXT)
    assert set(lines) == paths(tomllib.loads(TEXT))
    text = TEXT.splitlines()
    for path, line in lines.items():
        assert path[-1].startswith("[") or path[-1] in text[line - 1], (path, line)
    assert text[lines["points", "[1]"] - 1] == "[[points]]"
    assert text[lines["points", "[1]", "y"] - 1] == "y = 2"
    assert lines[("beta", "gamma", "last")] == text.index("last = -1e-4") + 1
    assert lines[("alpha", "inline", "eight", "nine", "ten")] == lines[("alpha", "inline")]


VALUES = st.sampled_from(
    [
        "1",
        "true",
        '"x = 1 # ]"',
        "'[a]'",
        "[1, 2]",
        "[\n  'a', # ]\n  'b',\n]",
        '"""\nk = 1\n"""',
        "-0.5e3",
        "07:32:00",
    ]
)


@given(st.lists(st.tuples(st.sampled_from(["", "[t{}]", "[t{}.u]"]), VALUES), min_size=1, max_size=12))
def test_keys_of_generated_texts_stand_where_they_are_said_to(parts: list[tuple[str, str]]) -> None:
    text, expected, table = "", {}, ()
    for index, (header, value) in enumerate(parts):
        if header:
            text += header.format(index) + "\n"
            table = tuple(header.format(index)[1:-1].split("."))
        expected[(*table, f"k{index}")] = text.count("\n") + 1
        text += f"k{index} = {value}\n"
    lines = key_lines(text)
    assert paths(tomllib.loads(text)) == set(lines)
    assert expected.items() <= lines.items()


@pytest.mark.parametrize("text", ["", "\n\n", "# only this", "a=1", "a=1 # x", "a=[]", "a={}"])
def test_short_texts(text: str) -> None:
    assert set(key_lines(text)) == paths(tomllib.loads(text))


def test_tables_of_arrays_in_arrays_have_their_numbers() -> None:
    text = "[[a]]\n[[a.b]]\nx = 1\n[[a.b]]\nx = 2\n[[a]]\n[[a.b]]\nx = 3\n[a.c]\ny = 4\n"
    lines = key_lines(text)
    assert set(lines) == paths(tomllib.loads(text))
    assert [lines["a", f"[{i}]", "b", f"[{j}]", "x"] for i, j in ((0, 0), (0, 1), (1, 0))] == [3, 5, 8]
    assert lines["a", "[1]", "c", "y"] == 10
