"""Lists sentences of more than 30 words, and those without a subject, in documents, docstrings and comments.

    python scripts/long_sentences.py [PATH ...]

Without a path it reads README.md, CONTRIBUTING.md, docs and flame_train, but for the log. It ends with 1 if a sentence
has no subject, as far as its beginning tells. A sentence ends at a full stop, a question mark or an exclamation mark.
A paragraph, an item of a list and a cell of a table end one too. Code counts as one word.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST = 30
ROOT = Path(__file__).parents[1]
_LEFT_OUT = "docs/log"  # what was seen on a day
_ENDINGS = {".md", ".py", ".cu", ".cuh", ".cpp"}
_CODE = re.compile(r"`+[^`]*`+")
_END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.|\w[\w, *]*:|#+)(?:\s|$)")
_WORD = re.compile(r"[A-Za-z`]")
_FRAGMENT = re.compile(r"Also\b|(?:Because|Although|Whereas|Unless)\b[^,]*$")
_PREDICATE = re.compile(
    r"(?:Is|Are|Was|Were|Has|Have|Had|Does|Can|Could|Must|Will|Would|Should|May|Might|Shall)\b.*[^?]$"
)
_COMMENT = re.compile(r"^\s*//(.*)$")
_PYTHON_COMMENT = re.compile(r"^\s*#+ ?(.*)$|  # (.*)$")

Text = tuple[int, str]
"""The number of a line, and what stands there."""


def sentences(path: Path) -> Iterator[Text]:
    """The sentences of a file, each with the line on which its paragraph begins."""
    text = path.read_text(encoding="utf-8")
    for line, block in {".md": _document, ".py": _python}.get(path.suffix, _cuda)(text):
        for sentence in _END.split(_CODE.sub("`", block)):
            yield line, " ".join(sentence.split())


def is_long(sentence: str) -> bool:
    """Whether it has more words than `MOST`."""
    return sum(_WORD.search(word) is not None for word in sentence.split()) > MOST


def has_no_subject(sentence: str, of_docstring: bool = False) -> bool:
    """Whether its first words show that it has none: an "also", a subordinate clause alone, or an auxiliary verb.

    A docstring may leave out its function: "Does not return."
    """
    return bool(_FRAGMENT.match(sentence) or (not of_docstring and _PREDICATE.match(sentence)))


def _document(text: str) -> Iterator[Text]:
    """Paragraphs, items of lists and cells of tables, without code blocks, fenced or indented."""
    lines: list[Text] = []
    fenced, may_indent = False, True
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            yield from _paragraphs(lines)
            lines = []
        elif not fenced and line.startswith("|"):
            yield from ((number, cell) for cell in line.split("|"))
        elif not fenced and may_indent and line.startswith("    "):
            continue  # an indented code block, which goes on until a line is not indented
        elif not fenced:
            lines.append((number, line))
        may_indent = not line.strip()
    yield from _paragraphs(lines)


def _python(text: str) -> Iterator[Text]:
    """Docstrings, and comments: those of whole lines are joined."""
    blocks = [ast.parse(text).body]
    while blocks:
        for statement in blocks.pop():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from _paragraphs(list(enumerate(value.value.splitlines(), statement.lineno)))
            blocks += [block for name in ("body", "orelse", "finalbody") if (block := getattr(statement, name, None))]
    comments: list[Text] = []
    for number, line in enumerate(text.splitlines(), 1):
        if found := _PYTHON_COMMENT.search(line):
            if comments and not (line.lstrip().startswith("#") and comments[-1][0] == number - 1):
                yield from _paragraphs(comments)
                comments = []
            comments.append((number, found[1] or found[2] or ""))
    yield from _paragraphs(comments)


def _cuda(text: str) -> Iterator[Text]:
    """Comments of whole lines."""
    found = ((n, _COMMENT.match(line)) for n, line in enumerate(text.splitlines(), 1))
    lines: list[Text] = [(n, match[1].strip() if match else "") for n, match in found]
    yield from _paragraphs(lines)


def _paragraphs(lines: list[Text]) -> Iterator[Text]:
    """Lines joined up to an empty one, the next item of a list, or the next argument of a docstring."""
    block: list[str] = []
    begin = 0
    for number, line in [*lines, (0, "")]:
        if block and (not line.strip() or _ITEM.match(line)):
            yield begin, " ".join(block)
            block = []
        if line.strip():
            begin = begin if block else number
            block.append(line.strip())


def files(paths: list[Path]) -> list[Path]:
    """The files below the paths that are read."""
    found = [p for path in paths for p in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [p for p in found if p.suffix in _ENDINGS and ROOT / _LEFT_OUT not in p.resolve().parents]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    given = parser.parse_args().paths
    usual = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs", "flame_train")]
    count = 0
    for path in files([p.resolve() for p in given] or usual):
        for line, sentence in sentences(path):
            lacking = has_no_subject(sentence, path.suffix == ".py")
            count += lacking
            if lacking or is_long(sentence):
                name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
                print(f"{name}:{line}: {'no subject' if lacking else f'more than {MOST} words'}: {sentence}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
