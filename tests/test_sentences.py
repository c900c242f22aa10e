"""Sentences of the documents and the package have a subject; a long one warns. `scripts/long_sentences.py` counts."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from scripts.long_sentences import MOST, ROOT, files, has_no_subject, is_long, sentences


@pytest.mark.filterwarnings("default")  # a long sentence is reported at the end of the run
def test_sentences_have_a_subject() -> None:
    places = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs", "flame_train")]
    read = [
        (f"{path.relative_to(ROOT)}:{line}: {sentence}", sentence, path.suffix == ".py")
        for path in files(places)
        for line, sentence in sentences(path)
    ]
    for place, sentence, _ in read:
        if is_long(sentence):
            warnings.warn(f"more than {MOST} words: {place}", stacklevel=1)
    advice = "`python scripts/long_sentences.py FILE` checks your change."
    lacking = [place for place, *sentence in read if has_no_subject(*sentence)]
    assert not lacking, "\n".join([f"{len(lacking)} sentences have no subject. {advice}", *lacking])


def test_a_sentence_without_a_subject_is_known() -> None:
    assert has_no_subject("Must be closed by the caller.")
    assert has_no_subject("Also memory budgets and streamed weights.")
    assert has_no_subject("Because the store does not answer.")
    assert not has_no_subject("Is it closed?")
    assert not has_no_subject("Does not return.", of_docstring=True)
    assert not has_no_subject("Because the store does not answer, the lease grows old.")


LONG = " ".join(["word"] * (MOST + 1))
SHORT = " ".join(["word"] * MOST)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.md", f"{SHORT}. {SHORT}!\n\n{SHORT}\n", []),
        ("a.md", f"one\n\n{LONG}\n", [3]),
        ("a.md", f"- {SHORT}\n- {SHORT}\n| {SHORT} | {SHORT} |\n", []),
        ("a.md", f"| a | {LONG} |\n", [1]),
        ("a.md", f"```\n{LONG}\n```\n", []),
        ("a.md", f"one\n\n    {LONG}\n\n    {LONG}\n", []),
        ("a.md", f"{SHORT}\n    more\n", [1]),
        ("a.md", f"{SHORT} `a b c d`\n", [1]),
        ("a.py", f'"""{SHORT}."""\n\n# {SHORT}\n# more.\nx = 1\n', [3]),
        (
            "a.py",
            f'def f():\n    """{SHORT}\n\n    Args:\n        x: {SHORT[:-5]}\n        y: {SHORT[:-5]}\n    """\n',
            [],
        ),
        ("a.py", f"x = 1  # {SHORT}\ny = 2  # {SHORT}\n", []),
        ("a.cuh", f"// {SHORT}\n// word\nint x;  // word\n", [1]),
    ],
)
def test_what_is_long(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    (tmp_path / name).write_text(text)
    assert [line for line, sentence in sentences(tmp_path / name) if is_long(sentence)] == lines
