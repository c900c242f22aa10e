"""The documentation site: what is made for it has every key, command, name and setting; it builds without a warning."""

from __future__ import annotations

import html
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import markdown
import pytest
import typer
from mkdocs.structure.files import Files

from flame_train import cli
from flame_train.config.foreign.recognize import PROGRAMS
from flame_train.config.keys import keys
from flame_train.engine import functional
from flame_train.tools.init import names, recipes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "site"))

hooks, pages = importlib.import_module("hooks"), importlib.import_module("pages")


def _page(address: str, text: str | None = None) -> tuple[str, dict[str, Any]]:
    """The Markdown that the site renders for a page of docs/, and its metadata."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri=address), meta={})
    if text is None:
        text = (ROOT / "docs" / address).read_text(encoding="utf-8")
    return hooks.on_page_markdown(text, page, None, Files([])), page.meta


def test_each_setting_of_another_trainer_is_on_one_of_its_pages() -> None:
    places = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "migration").glob("*.md")]
    texts = [_page(place)[0] for place in places]
    assert not any("<!-- settings" in text or "mkdocs serve" in text for text in texts)
    for program in PROGRAMS:
        cells = [f"| `{row.key}` |" for row in (*program.table().rows, *program.table().set_rows)]
        assert cells
        assert any(all(cell in text for cell in cells) for text in texts), program.name


@pytest.mark.parametrize("family", recipes())
def test_each_family_has_a_page_of_prose_with_its_presets(family: str) -> None:
    text, _ = _page(f"recipes/{family}.md")
    assert [name for name in names(family) if f"## {name.capitalize()}\n\n```toml\n" not in text] == []
    prose = (ROOT / "docs" / "recipes" / f"{family}.md").read_text(encoding="utf-8")
    assert "**How long.**" in prose
    assert "**What to look at.**" in prose
    code = [line for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert [line for line in code if line.startswith("#") and len(line) > 80] == []


def test_tests_are_not_shown_to_users() -> None:
    text, _ = _page("migration/kohya-recipe.md")
    assert "| `num_repeats` | `repeats` of `[data]` or of a set |\n" in text
    assert "tests/" not in text


def test_records_and_generated_lists_are_no_hits_of_the_search() -> None:
    for address in ("log/2026-11.md", "design/0001-house.md"):
        assert _page(address)[1] == {"search": {"exclude": True}}
    engine, guide, keys = (
        _page(address, "")[1]["search"]["boost"]
        for address in ("reference/flame_train.engine.optim.md", "training.md", "reference/keys.md")
    )
    assert engine < guide < keys


def test_code_of_the_commands_has_no_backslashes() -> None:
    page = pages.commands_page()
    assert "`--collectives auto|nccl|mpi`" in page
    assert re.findall(r"`[^`\n]*\\[^`\n]*`", page) == []


def test_bars_in_code_of_a_table_are_bars() -> None:
    table = "| command |\n|---|\n| `bench step\\|ops` |\n"
    text, _ = _page("training.md", table)
    assert text == table.replace("\\", "")


def test_the_steps_of_the_landing_page_are_one_list() -> None:
    """Rendered as MkDocs does: a step is more than its first paragraph, and its code belongs to it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rendered = markdown.markdown(text, extensions=["tables", "pymdownx.superfences"])
    (steps,) = re.findall(r"<ol>.*?</ol>", rendered, re.DOTALL)
    assert len(re.findall("<li>", steps)) == len(re.findall(r"^\d\. ", text, re.MULTILINE)) == 6
    assert len(re.findall("<pre>", steps)) == text.count("\n    ```\n")


LISTS = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "log"] + list(ROOT.glob("*.md"))


def test_what_belongs_to_an_item_of_a_list_is_indented_by_four() -> None:
    """Python-Markdown takes less for a paragraph of its own, and a list right after a paragraph for more of it."""
    wrong = []
    for path in LISTS:
        text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        before = ""
        for line in text.splitlines():
            new = re.match(r"(?:[-*]|\d+\.) ", line) and before and not re.match(r"(?:[-*]|\d+\.) |\s", before)
            if new or re.match(r" {1,3}(?:[-*]|\d+\.) ", line) or (not before and re.match(r" {1,3}\S", line)):
                wrong.append(f"{path.relative_to(ROOT)}: {line[:60]}")
            before = line
    assert wrong == []


def test_every_key_has_its_place() -> None:
    text = pages.keys_page()
    headings = re.findall(r"^### `([\w.]+)`$", text, re.MULTILINE)
    assert headings == list(keys())
    assert "## `[lora]`" in text


def test_every_command_and_option_has_its_line() -> None:
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


def test_every_public_name_has_its_place() -> None:
    for module in pages.MODULES:
        public = getattr(importlib.import_module(module), "__all__", None)
        members = re.findall(r"^        - (\w+)$", pages.names_page(module), re.MULTILINE)
        assert members
        if public is not None:
            assert members == [name for name in public if not name.startswith("__")]
    headings = re.findall(r"^## `(\w+)`$", pages.functional_page(), re.MULTILINE)
    assert headings == list(functional.__all__)


@pytest.mark.parametrize("program", ["sd-scripts", "ai-toolkit", "OneTrainer"])
def test_every_setting_of_another_trainer_is_in_its_table(program: str) -> None:
    (found,) = (known for known in PROGRAMS if known.name == program)
    table = pages.settings_table(program)
    for row in (*found.table().rows, *found.table().set_rows):
        assert f"| `{row.key}` |" in table
        for path in row.to:
            assert f"`{path.removeprefix('set.')}`" in table


@pytest.mark.slow
def test_it_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = [r"<(?:script|img|iframe)[^>]* src=.?https?:[^ >]*", r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"']
    fetched += [r'<link[^>]* rel="stylesheet"[^>]* href="https?:[^>]*']
    for path in tmp_path.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not any(re.search(pattern, text) for pattern in fetched), path
        assert 'data-md-component="source"' not in text, "the theme asks GitHub then"
    assert list(tmp_path.rglob("*.json")) == [tmp_path / "search" / "search_index.json"]
    assert 'href="training.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    reference = (tmp_path / "reference" / "flame_train.engine.html").read_text(encoding="utf-8")
    for name in ("trace", "Tensor", "no_grad"):
        assert f'id="flame_train.engine.{name}"' in html.unescape(reference)
