"""The documentation site: its made pages have every key, command, public name and setting; the whole of it builds."""

from __future__ import annotations

import html
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

from flame_train import cli
from flame_train.config.foreign.recognize import PROGRAMS
from flame_train.config.keys import keys
from flame_train.engine import functional

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts" / "site"))
    try:
        return importlib.import_module("pages")
    finally:
        sys.path.pop(0)


def test_every_key_has_its_place(pages: ModuleType) -> None:
    text = pages.keys_page()
    headings = re.findall(r"^### `([\w.]+)`$", text, re.MULTILINE)
    assert headings == list(keys())
    assert "## `[lora]`" in text


def test_every_command_and_option_has_its_line(pages: ModuleType) -> None:
    text = pages.commands_page()
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        parts = getattr(command, "commands", {"": command})
        for part, leaf in parts.items():
            words = " ".join(filter(None, ("flame-train", name, part)))
            chapter = text.split(f"## `{words}`\n")[1].split("\n## ")[0]
            for parameter in leaf.params:
                if parameter.param_type_name == "option":
                    assert f"`{parameter.opts[0]}" in chapter or f", {parameter.opts[0]}" in chapter


def test_every_public_name_has_its_place(pages: ModuleType) -> None:
    for module in pages.MODULES:
        public = getattr(importlib.import_module(module), "__all__", None)
        members = re.findall(r"^        - (\w+)$", pages.names_page(module), re.MULTILINE)
        assert members
        if public is not None:
            assert members == [name for name in public if not name.startswith("__")]
    headings = re.findall(r"^## `(\w+)`$", pages.functional_page(), re.MULTILINE)
    assert headings == list(functional.__all__)


@pytest.mark.parametrize("program", ["sd-scripts", "ai-toolkit", "OneTrainer"])
def test_every_setting_of_another_trainer_is_in_its_table(pages: ModuleType, program: str) -> None:
    (found,) = (known for known in PROGRAMS if known.name == program)
    table = pages.settings_table(program)
    for row in (*found.table().rows, *found.table().set_rows):
        assert f"| `{row.key}` |" in table
        for path in row.to:
            assert f"`{path.removeprefix('set.')}`" in table


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="training.html"' in index
    for name in ("trace", "Tensor", "no_grad"):
        reference = (tmp_path / "site" / "reference" / "flame_train.engine.html").read_text(encoding="utf-8")
        assert f'id="flame_train.engine.{name}"' in html.unescape(reference)
    pages_made = list((tmp_path / "site").rglob("*.html"))
    fetched = [p.name for p in pages_made if re.search(r'(src|href)="https?://[^"]*\.(js|css|woff2?)"', p.read_text())]
    assert fetched == []
