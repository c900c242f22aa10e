"""CLIP tokens against transformers' tokenizer and against ids published with CLIP."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.errors import ModelFileError
from flame_train.text_encoders.clip.tokenizer import SHIPPED, ClipTokenizer

BOS, EOS = 49406, 49407

HAND_WRITTEN = [
    "",
    " ",
    "\t\n  \r\n",
    "a photo of a cat",
    "A PHOTO OF SKS DOG, 8K, Ultra-Detailed!!!",
    "café naïve Ångström façade — déjà vu",
    "cafe\u0301 nai\u0308ve",  # decomposed accents
    "it's they're we've I'm you'll he'd don't IT'S DON'T 'tis o'clock",
    "1girl, solo, 2boys, 1920x1080, 3.14159, 1,000,000, v2.0-beta",
    "masterpiece,best quality,(detailed:1.2),[sketch],{{x}}",
    "🐱 a cat emoji 🐶🏽 family 👨‍👩‍👧‍👦 flag 🇯🇵",
    "猫の写真、東京タワー。",
    "一张猫的照片",
    "고양이 사진",
    "кошка на крыше",
    "قطة على السطح",
    "แมว",
    "Γάτα στη στέγη",
    "<|startoftext|>",
    "<|endoftext|>",
    "a <|endoftext|> b",
    "<|ENDOFTEXT|>",
    "x<|startoftext|>y",
    "<|endoftext",
    "!!!???...,,,;;;:::---___***///\\\\\\",
    "#hashtag @user $100 50% a&b c+d=e",
    "hello\u00a0world\u2003wide\u200bzero\ufeffbom",
    "tabs\tand\nnewlines\r\nmixed   spaces",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "a" * 300,
    "word " * 120,
    "\uff26\uff35\uff2c\uff2c width ﬁ ligature ½ ² Ⅷ",
    "İstanbul ǅ ß ẞ \u017f",
    "\u0000nul\u0001ctl",
    "http://example.org/a_b?c=d&e=f",
    "email@example.org",
    "&amp; &lt;b&gt;",
    "ⓐ①Ⅳ٣३",
    "\U0001f9ff\U00010348",
]


def _varied_captions(count: int) -> list[str]:
    """Hand-written traps, then a fixed mix of words, signs and scripts."""
    rng = random.Random(7)
    pieces = [
        "photo",
        "of",
        "a",
        "Sks",
        "DOG",
        "night-time",
        "don't",
        "l'été",
        "über",
        "ñandú",
        "42",
        "3d",
        "f/1.8",
        "...",
        "!!",
        "(",
        ")",
        ",",
        "  ",
        "\n",
        "東京",
        "猫",
        "🙂",
        "❤️",
        "\u0435\u0301",
        "\u0301",
        "'s",
        "'LL",
        "_",
        "<|",
        "|>",
        "½",
        "#1",
    ]
    mixed = [
        "".join(rng.choice(pieces) + rng.choice(["", " ", " "]) for _ in range(rng.randint(1, 40)))
        for _ in range(count - len(HAND_WRITTEN))
    ]
    return HAND_WRITTEN + mixed


def shipped_model() -> dict[str, Any]:
    return json.loads(gzip.decompress(SHIPPED.read_bytes()))["model"]


@pytest.fixture(scope="module")
def tokenizer() -> ClipTokenizer:
    return ClipTokenizer(pad_id=EOS)


@pytest.fixture(scope="module")
def tables_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables in the layout of a diffusers tokenizer folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = shipped_model()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *model["merges"]]) + "\n", encoding="utf-8")
    return folder


def test_ids_published_with_clip(tokenizer: ClipTokenizer) -> None:
    assert tokenizer.encode("a photo of a cat") == [320, 1125, 539, 320, 2368]
    assert tokenizer.encode("hello world!") == [3306, 1002, 256]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS, EOS)


def test_vocabulary_is_complete() -> None:
    """256 bytes, 256 that end a word, a token a merge, two special ones."""
    vocab, merges = (shipped_model()[table] for table in ("vocab", "merges"))
    assert len(merges) == 48894
    assert sorted(vocab.values()) == list(range(49408))
    assert [vocab[merge.replace(" ", "")] for merge in merges] == list(range(512, 49406))


def test_cached_captions_stay_valid() -> None:
    """The fingerprint is part of the cache's keys."""
    assert ClipTokenizer(EOS).fingerprint == "ce23bca717e45312dd9e9db93dd22f5ad38911f7043589ab395598f83e4e6251"
    assert ClipTokenizer(0).fingerprint == "9833c27bc13ac91e81fa4641a7b985ff3f04094361f51a3a80e56f1280c9d9da"


@pytest.mark.parity
def test_equals_transformers(tokenizer: ClipTokenizer, tables_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.CLIPTokenizer.from_pretrained(tables_folder)
    captions = _varied_captions(300)
    assert len(set(captions)) > 250
    for caption in captions:
        expected = reference(caption, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(caption) == expected, caption


@pytest.mark.parity
@pytest.mark.proof
def test_every_code_point_equals_transformers(tokenizer: ClipTokenizer, tables_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.CLIPTokenizer.from_pretrained(tables_folder)
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    texts = ["x".join(points[i : i + 64]) for i in range(0, len(points), 64)]
    for text, expected in zip(texts, reference(texts, add_special_tokens=False)["input_ids"], strict=True):
        assert tokenizer.encode(text) == expected, ascii(text)


@pytest.mark.parity
@pytest.mark.parametrize(("pad_token", "pad_id"), [("<|endoftext|>", EOS), ("!", 0)])
def test_padded_window_equals_transformers(tables_folder: Path, pad_token: str, pad_id: int) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.CLIPTokenizer.from_pretrained(tables_folder, pad_token=pad_token)
    ours = ClipTokenizer(pad_id)
    for caption in ["", "a photo of a cat", "word " * 75, "word " * 74, "word " * 100]:
        expected = reference(caption, padding="max_length", max_length=77, truncation=True)["input_ids"]
        assert ours.chunks(caption).ids[0].tolist() == expected


def test_folder_gives_the_same_tokens(tokenizer: ClipTokenizer, tables_folder: Path) -> None:
    from_folder = ClipTokenizer(EOS, tables_folder)
    for caption in HAND_WRITTEN:
        assert from_folder.encode(caption) == tokenizer.encode(caption)
    assert from_folder.fingerprint == tokenizer.fingerprint
    assert from_folder.fingerprint != ClipTokenizer(0, tables_folder).fingerprint


def test_broken_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"vocab\.json"):
        ClipTokenizer(EOS, tmp_path).encode("x")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b c\n")
    with pytest.raises(ModelFileError, match="two symbols"):
        ClipTokenizer(EOS, tmp_path).encode("x")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(ModelFileError, match="expected a CLIP vocabulary with"):
        ClipTokenizer(EOS, tmp_path).encode("x")
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|startoftext|>": 1, "<|endoftext|>": 2}')
    with pytest.raises(ModelFileError, match=r"do not fit \(Token `b` out of vocabulary"):
        ClipTokenizer(EOS, tmp_path).encode("x")


@pytest.mark.parametrize("pad_id", [0, EOS])
@pytest.mark.parametrize(
    ("words", "rows", "truncated"), [(0, 1, 0), (1, 1, 0), (75, 1, 0), (76, 2, 0), (150, 2, 0), (226, 3, 1)]
)
def test_chunks_of_75(pad_id: int, words: int, rows: int, truncated: int) -> None:
    chunks = ClipTokenizer(pad_id).chunks("cat " * words, max_chunks=3)
    assert chunks.ids.shape == (rows, 77)
    assert chunks.ids.dtype == np.int32
    assert (chunks.tokens, chunks.truncated) == (words, truncated)
    for row in range(rows):
        held = min(75, words - 75 * row)
        expected = [BOS, *[2368] * held, EOS, *[pad_id] * (75 - held)]
        assert chunks.ids[row].tolist() == expected


def test_windows_without_text_fill_a_batch(tokenizer: ClipTokenizer) -> None:
    chunks = tokenizer.chunks("a cat", max_chunks=3, at_least=3)
    assert chunks.ids.shape == (3, 77)
    assert (chunks.ids[1:] == [BOS, *[EOS] * 76]).all()
    with pytest.raises(ValueError, match="at_least"):
        tokenizer.chunks("a cat", max_chunks=1, at_least=2)


@given(text=st.text(max_size=400))
@settings(max_examples=100)
def test_any_text_keeps_every_token_or_counts_it(tokenizer: ClipTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    chunks = tokenizer.chunks(text, max_chunks=2)
    kept = [t for row in chunks.ids.tolist() for t in row[1 : 1 + 75]][: len(ids)]
    assert kept[: len(ids) - chunks.truncated] == ids[: len(ids) - chunks.truncated]
    assert len(ids) - chunks.truncated == min(len(ids), 150)
