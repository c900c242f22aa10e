"""The programs of docs/examples.md run as they stand, and their own assertions hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "examples.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))


def test_each_part_has_a_program() -> None:
    assert len(PROGRAMS) == PAGE.count("```python") == PAGE.count("\n## ") == 6


@pytest.mark.parametrize("title", PROGRAMS)
def test_it_runs(title: str) -> None:
    assert "assert " in PROGRAMS[title]
    exec(compile(PROGRAMS[title], title, "exec"), {"__name__": "example"})
