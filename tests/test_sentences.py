"""No sentence of the documents and the package has more than 25 words; `scripts/long_sentences.py` says what counts."""

from __future__ import annotations

from scripts.long_sentences import MOST, ROOT, files, long_sentences


def test_sentences_are_short() -> None:
    places = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs", "flame_train")]
    long = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in files(places)
        for line, sentence in long_sentences(path)
    ]
    advice = "Write a fact a sentence, or make a list; `python scripts/long_sentences.py FILE` checks your change."
    assert not long, "\n".join([f"{len(long)} sentences have more than {MOST} words. {advice}", *long])
