"""A config that is no TOML: the message says where, what was expected, what stands there, and what to do."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest

from flame_train.config.load import load
from flame_train.config.parse import parse
from flame_train.config.toml_lines import toml_error
from flame_train.errors import ConfigError

_CASES = [
    ("name = fox", "1:8: expected a value, got fox in the line `name = fox`; put text into quotes"),
    ("\n\na = ", "3:5: expected a value, got the end of the file in the line `a =`; put text into quotes"),
    ("save = True", "1:8: expected a value, got True in the line"),
    (
        "lr = 1,5",
        "1:7: expected the end of the line, got ,5 in the line `lr = 1,5`; put text into quotes, decimals with",
    ),
    ("[train]\nsteps: 200", "2:6: expected = after the key, got : 200 in the line `steps: 200`; write each setting as"),
    (
        "[lora\nrank = 1",
        "1:6: expected ] behind the section's name, got the end of the line in the line `[lora`; write",
    ),
    ("[[runs]\na = 1", "1:7: expected ]] behind the name, got ] in the line `[[runs]`; write"),
    ("[a]\nx = 1\nx = 2\n", "3:6: expected each key and section once, got one again in the line `x = 2`; keep one"),
    ("[a]\n[a]\n", "2:3: expected each key and section once, got one again in the line `[a]`; keep one"),
    ("a = {b = 1, b = 2}", "1:18: expected each key and section once, got one again in the line"),
    ('[a]\nx = "D:\\Users"', '2:10: expected text without a single backslash, got sers" in the line'),
    ('x = "\\q"', "1:8: expected text without a single backslash"),
    (
        'x = "a\ny = 1',
        '1:7: expected the quote that ends the text, got the end of the line in the line `x = "a`; close',
    ),
    (
        "x = 'a",
        "1:7: expected the quote that ends the text, got the end of the file in the line `x = 'a`; close the text",
    ),
    ('x = """a', "1:9: expected the quote that ends the text, got the end of the file"),
    ("x = [1, 2\n[b]\n", "2:1: expected a comma or the ] of a list, got [b] in the line `[b]`; close the list"),
    ("x = {a = 1", "1:11: expected a comma or the } of a table, got the end of the file"),
    ("= 3", "1:1: expected a key, a [section] or a # comment, got = 3 in the line"),
    ('x = "\x01"', '1:6: expected printable characters, got \\x01" in the line `x = "\\x01"`; remove'),
]


@pytest.mark.parametrize(("text", "message"), _CASES, ids=[text for text, _ in _CASES])
def test_a_syntax_error_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "x.toml")
    assert str(error.value).startswith(f"x.toml:{message}")
    assert "\n" not in str(error.value)


def test_it_is_told_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[output]\nname = fox\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.toml:2:8: expected a value, got fox in the line `name = fox`; put text"):
        load(str(path))


def test_every_reason_of_python_has_words_here() -> None:
    """The reasons are those in the source of this Python's own parser."""
    source = inspect.getsource(__import__("tomllib._parser", fromlist=["_parser"]))
    reasons = re.findall(r"""(?:TOMLDecodeError|suffixed_err)\(\s*(?:src, pos, )?f?(["'])(.*?)\1\s*[,)]""", source)
    known = [reason.replace("{expect!r}", "'x'") for _, reason in reasons if not reason.startswith("{")]
    assert len(known) >= 12
    for reason in known:
        told = toml_error(f"{reason} (at line 1, column 1)", "x.toml", "a")
        assert "expected TOML" not in told, reason


def test_a_long_line_is_cut() -> None:
    text = "a = " + "x" * 5000
    with pytest.raises(tomllib.TOMLDecodeError) as reason:
        tomllib.loads(text)
    assert len(toml_error(str(reason.value), "x.toml", text)) < 300
