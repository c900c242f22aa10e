"""The README and the page of files agree with the program."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flame_train.families import FAMILY_TITLES, family_data

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short_and_has_its_parts_in_order() -> None:
    assert 1500 <= len(README.split()) <= 1800
    heads = ["From a folder to ComfyUI", "Watch a run", "Which card", "What is tested, and what is not", "Commands"]
    assert re.findall(r"^## (.+)$", README, re.MULTILINE) == [*heads, "Test", "Where to read on", "License"]


def test_every_command_of_the_readme_exists_and_the_reverse() -> None:
    table = README.partition("| command | does |\n")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines()]
    listed = {name for cell in cells for name in re.findall(r"`([a-z0-9-]+)", cell)} - {""}
    code = "from flame_train.cli import app; import typer; print(*typer.main.get_command(app).commands)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert listed == set(done.stdout.split())


def test_the_page_of_figures_is_of_the_measurements() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/step_table.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert page == done.stdout, "run scripts/step_table.py --write"
    measured = json.loads((ROOT / "docs" / "step_times.json").read_text(encoding="utf-8"))
    rows = [line for line in page.splitlines() if re.match(r"\| .* NVIDIA \w+ \[\d+\] \|$", line)]
    assert len(rows) == len(measured)
    for row, measurement in zip(rows, measured, strict=True):
        assert all(part in row for part in (f"{measurement['ms']}", measurement["date"], measurement["card"]))


def test_the_table_of_cards_is_of_the_predictions() -> None:
    script = _script("card_table")
    rows = json.loads((ROOT / "docs" / "card_table.json").read_text(encoding="utf-8"))
    assert [(row["model"], row["gib"]) for row in rows] == script.CASES
    for path in script.PAGES:
        assert script.page(path, rows) == path.read_text(encoding="utf-8"), "run scripts/card_table.py --write"
    assert all(row["peak_gib"] is None or row["peak_gib"] <= row["gib"] for row in rows)


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_ops_names_what_is_slower_missing_and_a_view() -> None:
    def row(op: str, phase: str, us: float, torch: float | None, captured: bool = True) -> dict[str, Any]:
        ratio = None if torch is None else us / torch
        same = {"precision": "bf16", "shapes": "2x3", "implementation": "own", "captured": captured}
        return {"op": op, "phase": phase, "us": us, "torch_us": torch, "ratio": ratio, **same}

    rows = [
        row("add", "forward", 3.0, 4.0),
        row("narrow", "backward", 5.0, 4.0),
        row("fp8_quantize", "forward", 9.0, None),
        row("scaled_linear", "backward", 5.0, 5.0),
        row("sort", "forward", 8.0, 8.0, captured=False),
        row("add", "forward", 1.0, 4.0),
    ]
    about = {"card": "a card", "date": "2026-01-02", "torch": "2.11", "rows": rows, "views": ["narrow"]}
    made = _script("op_table").table(about | {"not_reached": {"bf16": ["topk"]}, "failed": {"bf16": {"fold": "why"}}})
    lines = made.splitlines()
    assert "| bf16 | 5 | 1.00 | 1 | `narrow backward` | `topk` | `fold` |" in lines
    assert "| tf32 | 0 |  | 0 | none | none | none |" in lines
    assert [line for line in lines if line.startswith(("| add", "| narrow", "| fp8", "| scaled", "| sort"))] == [
        "| add | 2x3 | bf16 | own | 3.0 | 0.75 |  |  |",
        "| add | 2x3 | bf16 | own | 1.0 | 0.25 |  |  |",
        "| fp8_quantize | 2x3 | bf16 | own | 9.0 | none |  |  |",
        "| narrow | 2x3 | bf16 | own | view |  | 5.0 | 1.25 |",
        "| scaled_linear | 2x3 | bf16 | own | missing |  | 5.0 | 1.00 |",
        "| sort | 2x3 | bf16 | own | 8.0 host | 1.00 |  |  |",
    ]


@pytest.mark.parametrize("family", FAMILY_TITLES)
def test_documents_have_every_family(family: str) -> None:
    """The first paragraph of the README names it, and it has a page."""
    first = README.split("\n\n")[1]
    for word in re.findall(r"[A-Z][\w.-]*", FAMILY_TITLES[family]):
        assert word in first or word.rstrip("0123456789.") in first, word
    assert (ROOT / "docs" / "recipes" / f"{family}.md").exists()


def test_the_table_of_cards_has_each_measurement_of_the_presets() -> None:
    """The first figure of each of a family's cards stands in the row of its card."""
    cards = {family: family_data(family).get("cards", []) for family in FAMILY_TITLES}
    memory = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) GB \|(.*)$", memory, re.MULTILINE))
    assert set(map(int, rows)) == {row["gb"] for family in cards.values() for row in family}
    for family in cards.values():
        for row in family:
            figure = re.search(r"[\d.]+ GiB", row["source"])
            assert figure is not None
            assert figure[0] in rows[str(row["gb"])]


def test_the_filled_in_config_is_one_that_init_writes(tmp_path: Path) -> None:
    """But for what is filled in: so a user finds in the README what stands in the file."""
    (block,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    shown = tomllib.loads(re.sub(r"(?m)^   ", "", block))
    command = [sys.executable, "-m", "flame_train", "init", "sdxl", "--preset", "character", "--card", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    written = tomllib.loads(done.stdout)
    filled = {"model": ["checkpoint"], "data": ["path"], "output": ["dir", "name"], "sample": ["prompts"]}
    filled |= {"captions": ["trigger"]}
    for tree in (shown, written):
        for section, names in filled.items():
            for name in names:
                tree[section].pop(name, None)
    assert shown == written
