"""The README and the page of files agree with the program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_files_is_of_this_package() -> None:
    done = subprocess.run([sys.executable, "scripts/tree.py"], capture_output=True, text=True, check=True, cwd=ROOT)
    page = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    assert page == done.stdout, "run scripts/tree.py --write"
    files = [path for path in (ROOT / "flame_train").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    names = [line.split()[0] for line in page.splitlines() if line.startswith(" ")]
    expected = [path.name for path in files if path.name != "__init__.py"]
    expected += [f"{path.parent.name}/" for path in files if path.name == "__init__.py"]
    expected.remove("flame_train/")
    assert sorted(names) == sorted(expected)


def test_every_command_of_the_readme_exists_and_the_reverse() -> None:
    listed = set(re.findall(r"^\| `([a-z0-9-]+)", README, re.MULTILINE))
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
    rows = [line for line in page.splitlines() if re.match(r"\| (SDXL|SD3|Flux)", line)]
    assert len(rows) == len(measured)
    for row, measurement in zip(rows, measured, strict=True):
        assert all(part in row for part in (f"{measurement['ms']}", measurement["date"], measurement["card"]))
