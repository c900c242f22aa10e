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
    found = set()
    for name, value in tree.items():
        found.add((*prefix, name))
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict) or name == "points":
            for item in values:
                found |= paths(item, (*prefix, name))
    return found


def test_every_key_of_a_hard_text_has_its_line() -> None:
    lines = {path: line for path, line in key_lines(TEXT).items() if "[]" not in path}
    assert set(lines) == paths(tomllib.loads(TEXT))
    text = TEXT.splitlines()
    for path, line in lines.items():
        assert path[-1] in text[line - 1], (path, line)
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
