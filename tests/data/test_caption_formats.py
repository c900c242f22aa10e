"""Caption bytes to text: every encoding with a mark, and everything else refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flame_train.data.caption_formats import MAX_CAPTION_BYTES, decode_text, read_captions, read_metadata
from flame_train.errors import DataError

TEXT = "ein Füchschen, 狐 🦊"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_encodings_with_and_without_mark(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.encode(encoding))
    assert read_captions(tmp_path / "a.txt")[0] == TEXT


@pytest.mark.parametrize(("encoding", "mark"), [("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")])
def test_utf16_of_both_byte_orders(tmp_path: Path, encoding: str, mark: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(mark + TEXT.encode(encoding))
    assert read_captions(tmp_path / "a.txt")[0] == TEXT


@pytest.mark.parametrize("data", [b"a cat\r\non a mat\r\n", b"a cat\ron a mat", b"\n a cat \n\n\ton a mat\n"])
def test_lines_become_one(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_captions(tmp_path / "a.txt")[0] == "a cat on a mat"


@pytest.mark.parametrize("data", [b"", b" \r\n\t", b"\xef\xbb\xbf", b"\xff\xfe"])
def test_empty_is_allowed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_captions(tmp_path / "a.txt")[0] == ""


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"fine\nM\xfcller\n", "n.txt:2: not valid UTF-8"),
        (b"\xef\xbb\xbfone\r\ntwo\r\n\xff", "n.txt:3: not valid UTF-8-SIG"),
        (b"\xff\xfea\0\n\0\x00\xd8", "n.txt:2: not valid UTF-16"),
        (b"one\n\ntwo \0 nul", "n.txt:3: holds a NUL"),
        ("no mark".encode("utf-16-le"), "n.txt:1: holds a NUL"),
    ],
)
def test_refused_with_its_line(data: bytes, place: str) -> None:
    with pytest.raises(DataError) as caught:
        decode_text(data, "n.txt")
    assert str(caught.value).startswith(place)


def test_size_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * MAX_CAPTION_BYTES)
    assert len(read_captions(tmp_path / "a.txt")[0]) == MAX_CAPTION_BYTES
    (tmp_path / "a.txt").write_bytes(b"x" * 1_000_000)
    with pytest.raises(DataError, match="larger than"):
        read_captions(tmp_path / "a.txt")[0]


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_text_or_a_named_error(data: bytes) -> None:
    try:
        text = decode_text(data, "n.txt")
    except DataError as error:
        message = str(error)
    else:
        assert "\0" not in text
        assert "\r" not in text
        text.encode("utf-8")  # no half surrogate pairs
        return
    assert message.startswith("n.txt:")
    assert int(message.split(":")[1]) <= 1 + data.count(b"\n") + data.count(b"\r")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r")))
def test_text_survives(text: str) -> None:
    assert decode_text(text.encode("utf-8-sig"), "n") == text


def metadata_file(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "metadata.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_metadata(tmp_path: Path) -> None:
    path = metadata_file(
        tmp_path,
        {"file_name": "a.png", "text": "one"},
        "",
        {"file_name": "./sub/b c.png", "caption": "two\r\nlines", "width": 3},
        {"file_name": "ü🦊.png", "text": "", "caption": None},
    )
    metadata = read_metadata(path)
    assert metadata.problems == ()
    found = {key: (entry.caption, entry.line) for key, entry in metadata.entries.items()}
    assert found == {"a.png": ("one", 1), "sub/b c.png": ("two lines", 3), "ü🦊.png": ("", 4)}


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "expected an object, got list"),
        ({"text": "x"}, "file_name"),
        ({"file_name": "", "text": "x"}, "file_name"),
        ({"file_name": 7, "text": "x"}, "file_name"),
        ({"file_name": "a.png"}, 'expected "text" or "caption"'),
        ({"file_name": "a.png", "text": 5}, '"text" must be text, got int'),
        ({"file_name": "a.png", "text": ["x"]}, '"text" must be text, got list'),
        ({"file_name": "a.png", "text": "x", "caption": "y"}, "differ"),
        ({"file_name": "a.png", "text": "x\0"}, "NUL"),
        ('{"file_name": "a.png", "text": "\\ud800"}', "surrogate"),
        ({"file_name": "a.png", "text": "x" * 70_000}, "longer than"),
        ({"file_name": "../a.png", "text": "x"}, "leads out of the folder"),
        ({"file_name": "b/../../a.png", "text": "x"}, "leads out of the folder"),
        ({"file_name": "b\\..\\..\\a.png", "text": "x"}, "leads out of the folder"),
        ({"file_name": "/etc/passwd", "text": "x"}, "leads out of the folder"),
        ({"file_name": "\\\\host\\a.png", "text": "x"}, "leads out of the folder"),
        ({"file_name": "C:\\a.png", "text": "x"}, "leads out of the folder"),
        ({"file_name": "a\0.png", "text": "x"}, "NUL"),
        ({"file_name": "ok.png", "text": "again"}, "listed already in line 1"),
        ({"file_name": "./ok.png", "text": "again"}, "listed already in line 1"),
    ],
)
def test_wrong_line_is_named_and_the_others_read(tmp_path: Path, line: Any, match: str) -> None:
    path = metadata_file(tmp_path, {"file_name": "ok.png", "text": "fine"}, line, {"file_name": "z.png", "text": "z"})
    metadata = read_metadata(path, "metadata.jsonl")
    assert list(metadata.entries) == ["ok.png", "z.png"]
    assert len(metadata.problems) == 1
    assert metadata.problems[0].startswith("metadata.jsonl:2: ")
    assert match in metadata.problems[0]


@given(st.binary(max_size=200))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_metadata_or_a_named_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "metadata.jsonl"
    path.write_bytes(data)
    try:
        metadata = read_metadata(path, "m")
    except DataError as error:
        message = str(error)
        assert message.startswith("m:")
    else:
        assert all(problem.startswith("m:") for problem in metadata.problems)
