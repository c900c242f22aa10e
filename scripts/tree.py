"""Write `docs/tree.md`: every file of the package with the first sentence of its docstring.

python scripts/tree.py           prints the page
python scripts/tree.py --write   writes it
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tree.md"
_WIDTH = 34


def page() -> str:
    """The page in Markdown: its heading, then the tree as a code block."""
    lines = _folder(ROOT / "flame_train", 0)
    return "\n".join(
        ["# The package, file by file", "", "Written by `scripts/tree.py --write`.", "", "```", *lines, "```", ""]
    )


def _folder(folder: Path, depth: int) -> list[str]:
    lines = [_line(depth, f"{folder.name}/", _about(folder / "__init__.py"))]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += _folder(path, depth + 1)
        elif path.suffix in (".py", ".cu", ".cuh") and path.name != "__init__.py":
            lines.append(_line(depth + 1, path.name, _about(path)))
    return lines


def _line(depth: int, name: str, about: str) -> str:
    return f"{'  ' * depth + name:<{_WIDTH}}{about}".rstrip()


def _about(path: Path) -> str:
    """The first sentence of a file's docstring, or of the comment that a kernel file starts with."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
        text = "\n".join(line.lstrip("/ ") for line in comment)
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"\.\s+(?=[A-Z`])", paragraph)[0].rstrip(".")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
