"""Sentences of the documents and the package have a subject; a long one warns. `scripts/long_sentences.py` counts."""

from __future__ import annotations

import warnings

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


def test_a_sentence_of_more_than_thirty_words_is_long() -> None:
    assert not is_long("word " * 30)
    assert is_long("word " * 31)
