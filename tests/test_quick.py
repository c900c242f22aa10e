"""The choice of tests of `scripts/test.sh --quick` exists, reaches every package, and none of it is marked slow."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "quick.txt"
WITHOUT = {"remote", "sweep"}
"""Stores and sweeps, whose tests need servers and processes."""


def chosen() -> list[Path]:
    paths = [ROOT / line.partition("::")[0] for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]


def test_the_choice_is_there_and_reaches_every_package() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in chosen())
    packages = {path.parent.name for path in (ROOT / "flame_train").glob("*/__init__.py")}
    assert packages - set(re.findall(r"\bflame_train\.(\w+)", text)) - WITHOUT == set()


def test_none_of_it_is_slow() -> None:
    slow = [path for path in chosen() if "mark.slow\n" in path.read_text(encoding="utf-8").split("\ndef ")[0]]
    assert slow == []
