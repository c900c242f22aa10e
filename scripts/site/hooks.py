"""Hooks of MkDocs: the pages made from the sources, and links between documents that were written for the repository.

The documents cite files as `docs/training.md`, which are links on the site, and link to sources, which lie elsewhere.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import pages

_MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_MARK = re.compile(r"^.*<!-- (settings|recipes): (.+?) -->$", re.MULTILINE)
"""A line that a table takes the place of; before the mark it says so to those who read the page elsewhere."""
_TABLES = {"settings": pages.settings_table, "recipes": pages.presets_and_cards}
_NOT_SEARCHED = ("log/", "op-times.md", "changelog.md", "contributing.md", "design/", "performance.md")
"""Pages that a user's search does not find: records, generated lists, and what is for those who change the code."""
_BOOSTS = {
    ("reference/keys.md",): 20,
    ("index.md", "training.md", "datasets.md", "memory.md", "recipes/"): 10,
    ("migration/",): 2,
    ("reference/flame_train", "reference/functional.md", "ops.md", "numerics.md", "glossary.md"): 0.001,
}
"""Pages that a search finds before others, and those of the engine, which it finds after them.

A word in a title counts a thousand times, so the smallest factor outweighs that.
"""


def on_config(config: Any) -> Any:
    """Puts the pages of a folder in the place of an entry that ends with /."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(nav: list[Any], folder: Path) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            found.append({title: _expanded(v, folder) if isinstance(v, list) else v for title, v in entry.items()})
        elif entry.endswith("/"):
            paths = sorted((folder / entry).glob("*.md"), key=lambda path: (path.name != "index.md", path.name))
            found += [path.relative_to(folder).as_posix() for path in paths]
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made."""
    for address, text in pages.generated().items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fills in tables, and turns links of the repository into those of the site."""
    here = page.file.src_uri
    if here.startswith(_NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    for places, boost in _BOOSTS.items():
        if here.startswith(places):
            page.meta["search"] = {"boost": boost}
    if here == "comparison.md":
        page.meta["hide"] = ["toc"]  # its table is wide
    markdown = _MARK.sub(lambda found: _TABLES[found[1]](found[2]), markdown)
    markdown = _without_tests(markdown)
    return _outside_code(markdown, lambda text: _with_links(_bars_of_code(text), here, files))


def _bars_of_code(text: str) -> str:
    """Bars in code without the backslash that GitHub wants in a table, and Python-Markdown shows."""
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), text)


def _without_tests(markdown: str) -> str:
    """Leaves out the last column of tables whose head calls it "shown by": tests, which a user does not look up."""
    return re.sub(
        r"^\|.*\| shown by \|\n(?:\|.*\n?)+",
        lambda table: re.sub(r"(?m)(?<=\|)[^|\n]*\|$", "", table[0]),
        markdown,
        flags=re.MULTILINE,
    )


def _with_links(text: str, here: str, files: Files) -> str:
    lies_in = posixpath.dirname(_in_repository(here))
    text = re.sub(
        r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))",
        lambda found: found[1] + _target(posixpath.normpath(posixpath.join(lies_in, found[2])), here, files) + found[3],
        text,
    )
    return re.sub(
        r"(?<!\[)`((?:docs/[\w./-]+|README|CONTRIBUTING|CHANGELOG)\.md)`(?!\])",
        lambda found: f"[`{found[1]}`]({_target(found[1], here, files)})",
        text,
    )


def _outside_code(markdown: str, change: Any) -> str:
    """Changes what does not stand between fences."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def _in_repository(address: str) -> str:
    """The path in the repository of a page of the site."""
    back = {site: path for path, site in _MOVED.items()}
    return back.get(address, f"docs/{address}")


def _target(path: str, here: str, files: Files) -> str:
    """The link from a page to a path of the repository: a page or an image of the site, else the file's source."""
    address = _MOVED.get(path, path.removeprefix("docs/"))
    known = files.get_file_from_path(address)
    if known is not None:
        return posixpath.relpath(address, posixpath.dirname(here) or ".")
    return f"{pages.REPOSITORY}/{path}" if (pages.ROOT / path).exists() else path
