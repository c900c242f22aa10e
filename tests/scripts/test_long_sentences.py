"""Sentences of more than 25 words: what counts as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.long_sentences import long_sentences

LONG = " ".join(["word"] * 26)
SHORT = " ".join(["word"] * 25)


def found(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    (tmp_path / name).write_text(text)
    return long_sentences(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.md", f"{SHORT}. {SHORT}!\n\n{SHORT}\n", []),
        ("a.md", f"one\n\n{LONG}\n", [3]),
        ("a.md", f"- {SHORT}\n- {SHORT}\n| {SHORT} | {SHORT} |\n", []),
        ("a.md", f"| a | {LONG} |\n", [1]),
        ("a.md", f"```\n{LONG}\n```\n", []),
        ("a.md", f"one\n\n    {LONG}\n\n    {LONG}\n", []),
        ("a.md", f"{SHORT}\n    more\n", [1]),
        ("a.md", f"{SHORT} `a b c d`\n", [1]),
        ("a.py", f'"""{SHORT}."""\n\n# {SHORT}\n# more.\nx = 1\n', [3]),
        (
            "a.py",
            f'def f():\n    """{SHORT}\n\n    Args:\n        x: {SHORT[:-5]}\n        y: {SHORT[:-5]}\n    """\n',
            [],
        ),
        ("a.py", f"x = 1  # {SHORT}\ny = 2  # {SHORT}\n", []),
        ("a.cuh", f"// {SHORT}\n// word\nint x;  // word\n", [1]),
    ],
)
def test_what_counts(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    assert [line for line, _ in found(tmp_path, name, text)] == lines
