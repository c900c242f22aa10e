"""The package stays easy to survey: a file has at most 400 lines, and a folder at most 30 Python files."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flame_train"
LINES, FILES = 400, 30


def test_no_file_is_longer_than_one_idea() -> None:
    sources = [path for ending in ("py", "cu", "cuh") for path in PACKAGE.rglob(f"*.{ending}")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    too_long = {path.relative_to(PACKAGE).as_posix(): n for path, n in lengths.items() if n > LINES}
    assert lengths
    assert too_long == {}


def test_no_folder_has_more_files_than_one_surveys() -> None:
    counts = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert counts
    assert {folder.relative_to(PACKAGE).as_posix(): n for folder, n in counts.items() if n > FILES} == {}


def test_the_page_of_the_house_has_the_layers_that_are_checked() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [
        " > ".join(f"{{{each.replace(' | ', ', ')}}}" if " | " in each else each for each in contract["layers"])
        for contract in linter["contracts"]
        if contract["type"] == "layers"
    ]
    page = (ROOT / "docs" / "design" / "0001-house.md").read_text(encoding="utf-8")
    assert layers
    assert [each for each in layers if f"`{each}`" not in page] == []
