"""T5 tokens against transformers' and SentencePiece's own, on a small model trained here; and the files they need."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.text_encoders.t5.tokenizer import (
    EOS,
    PUBLISHED_ROWS,
    SHIPPED,
    UMT5_ROWS,
    T5Tokenizer,
    cleaned,
    find_vocabulary,
    named_vocabulary,
    parse_spiece,
)

WORDS = """
a photo of the cat dog sitting on roof night city red blue painting style detailed high quality portrait woman lake
mountain sunset cinematic light soft 4k 8k film grain café naïve sks watercolor running through
""".split()
TRAPS = [
    "",
    " ",
    "\t\n  \r\n",
    "A PHOTO OF SKS DOG, 8K!!!",
    "café naïve Ångström façade — déjà vu",
    "cafe\u0301 nai\u0308ve",
    "it's they're don't 'tis o'clock",
    "masterpiece,best quality,(detailed:1.2),[sketch],{{x}}",
    "🐱 a cat emoji 🐶🏽 family 👨‍👩‍👧‍👦",
    "猫の写真、東京タワー。",
    "고양이 사진",
    "кошка на крыше",
    "قطة على السطح",
    "hello\u00a0world\u2003wide\u200bzero\ufeffbom",
    "\uff26\uff35\uff2c\uff2c width ﬁ ligature ½ ² Ⅷ",
    "a" * 300,
    "x▁y ▁ ▁▁z",
    "\u0000nul\u0001ctl",
    "tabs\tand\nnewlines\r\nmixed   spaces ",
    "http://example.org/a_b?c=d&e=f",
    "word " * 120,
    "\U0001f9ff\U00010348",
    "1,000,000 3.14159 1920x1080",
    "İstanbul ǅ ß ẞ \u017f",
]
SPECIAL = ["a </s> b", "</s>", "x<extra_id_3>y <extra_id_99>", "<pad><unk> cat", " <pad>  dog ", "<extra_id_100>"]


def captions(count: int) -> list[str]:
    """The traps, then a fixed mix of words, signs and scripts."""
    rng = random.Random(3)
    pieces = [*WORDS, "42", "f/1.8", "...", "!!", "(", ")", ",", "  ", "\n", "東京", "🙂", "\u0301", "'s", "½", "Ünï"]
    mixed = [
        "".join(rng.choice(pieces) + rng.choice(["", " ", " "]) for _ in range(rng.randint(1, 40)))
        for _ in range(count - len(TRAPS))
    ]
    return TRAPS + mixed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `spiece.model` of the ids and the normalisation that T5's has, but 200 pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("tokenizer_3")
    rng = random.Random(0)
    corpus = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 14))) + rng.choice(".!,?") for _ in range(600)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_prefix=str(folder / "spiece"),
        vocab_size=200,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return folder


@pytest.mark.parity
def test_equals_transformers(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.T5Tokenizer.from_pretrained(trained)
    ours = T5Tokenizer(trained)
    assert len(ours.vocabulary.pieces) == len(reference)
    texts = captions(300) + SPECIAL
    assert len(set(texts)) > 250
    for text in texts:
        assert ours.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parity
@pytest.mark.proof
def test_every_code_point_equals_transformers(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference, ours = transformers.T5Tokenizer.from_pretrained(trained), T5Tokenizer(trained)
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    texts = ["a".join(points[i : i + 64]) for i in range(0, len(points), 64)]
    for text, expected in zip(texts, reference(texts, add_special_tokens=False)["input_ids"], strict=True):
        assert ours.encode(text) == expected, ascii(text)


@pytest.mark.parity
@pytest.mark.parametrize("length", [1, 2, 77, 154, 256, 512])
def test_padded_row_equals_transformers(trained: Path, length: int) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.T5Tokenizer.from_pretrained(trained)
    ours = T5Tokenizer(trained)
    for text in ["", "a photo of a cat", *("cat " * n for n in (75, 76, 77, 153, 300, 600))]:
        row = ours.row(text, length)
        expected = reference(text, padding="max_length", max_length=length, truncation=True)
        assert row.ids.tolist() == expected["input_ids"]
        assert row.mask.tolist() == [bool(m) for m in expected["attention_mask"]]
        words = text.count("cat") if text.startswith("cat") else len(ours.encode(text))
        assert row.truncated == max(0, words - (length - 1))


@pytest.mark.parity
def test_equals_sentencepiece(trained: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(trained / "spiece.model"))
    ours = T5Tokenizer(trained / "spiece.model")
    for text in captions(300):
        assert ours.encode(text) == reference.encode(text), text


@pytest.mark.parity
def test_tokenizer_json_gives_the_same(trained: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.T5Tokenizer.from_pretrained(trained).save_pretrained(tmp_path)
    assert not (tmp_path / "spiece.model").exists()
    ours, theirs = T5Tokenizer(trained), T5Tokenizer(tmp_path)
    assert ours.fingerprint == theirs.fingerprint
    for text in TRAPS + SPECIAL:
        assert ours.encode(text) == theirs.encode(text)


PIECES = [
    ("<pad>", 0.0),
    ("</s>", 0.0),
    ("<unk>", 0.0),
    ("▁", -3.0),
    ("▁a", -2.0),
    ("c", -5.0),
    ("at", -4.0),
    ("▁cat", -6.0),
    ("ca", -9.0),
    ("t", -9.0),
    ("<extra_id_0>", 0.0),
]


def tokenizer_json(folder: Path, kind: str = "Unigram", pieces: object = PIECES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model": {"type": kind, "unk_id": 2, "vocab": pieces}, "normalizer": None}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "tokenizer.json"


def test_the_likeliest_pieces_padded_and_cut(tmp_path: Path) -> None:
    tokenizer = T5Tokenizer(tokenizer_json(tmp_path))
    # "▁cat" -6 is likelier than "▁" "c" "at" -12; "▁at" has no piece of its own
    assert tokenizer.encode("a cat  at") == [4, 7, 3, 6]
    assert tokenizer.encode("a<extra_id_0>") == [4, 10]
    row = tokenizer.row("a cat at", 6)
    assert (row.ids.tolist(), row.truncated) == ([4, 7, 3, 6, EOS, 0], 0)
    assert row.mask.tolist() == [True] * 5 + [False]
    assert row.ids.dtype == np.int32
    cut = tokenizer.row("a cat at", 3)
    assert (cut.ids.tolist(), cut.truncated) == ([4, 7, EOS], 2)
    with pytest.raises(ValueError, match="at least 1"):
        tokenizer.row("a", 0)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a protocol buffer; payloads here are under 128 bytes."""
    return bytes([number << 3 | 2, len(payload)]) + payload


def spiece_of(pieces: list[tuple[str, float]], kind: int = 1) -> bytes:
    body = b"".join(field(1, field(1, t.encode()) + b"\x15" + struct.pack("<f", score)) for t, score in pieces)
    return body + field(2, bytes([3 << 3, kind])) + field(3, field(1, b"nmt_nfkc"))


def test_a_model_file_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(spiece_of(PIECES[:-1]))
    tokenizer = T5Tokenizer(tmp_path)
    assert tokenizer.vocabulary.pieces[:10] == tuple(PIECES[:-1])
    assert len(tokenizer.vocabulary.pieces) == 110  # and the 100 sentinels
    assert tokenizer.encode("a cat") == [4, 7]
    assert tokenizer.fingerprint != T5Tokenizer(tokenizer_json(tmp_path / "other")).fingerprint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no pieces"),
        (spiece_of(PIECES[:-1], kind=2), "another kind than unigram"),
        (spiece_of(PIECES[1:]), r"first pieces are '</s>', '<unk>', '▁', not '<pad>'"),
        (spiece_of(PIECES[:-1])[:-3], "cut off"),
        (spiece_of([*PIECES[:4], ("x", float("nan"))]), "not a finite number"),
        (b"{]", "not T5's vocabulary"),
        (b"PK\x03\x04", "not T5's vocabulary"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "spiece.model").write_bytes(content)
    with pytest.raises(ModelFileError, match=reason):
        T5Tokenizer(tmp_path).encode("x")


def test_a_damaged_normalisation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(spiece_of(PIECES[:-1]) + field(3, field(2, b"abc")))
    with pytest.raises(ModelFileError, match="damaged, fetch it again"):
        T5Tokenizer(tmp_path).encode("x")


@given(units=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=16), rest=st.binary(max_size=20), text=st.text())
@settings(max_examples=200)
def test_any_normalisation_works_or_is_damage(
    tmp_path_factory: pytest.TempPathFactory, units: list[int], rest: bytes, text: str
) -> None:
    """The library panics where its table leads beyond its end, which is no `Exception` in Python."""
    path = tmp_path_factory.getbasetemp() / "mutated" / "spiece.model"
    path.parent.mkdir(exist_ok=True)
    table = struct.pack(f"<{len(units)}I", *units)
    path.write_bytes(spiece_of(PIECES[:-1]) + field(3, field(2, struct.pack("<I", len(table)) + table + rest)))
    with contextlib.suppress(ModelFileError):
        T5Tokenizer(path).encode(text)


def test_a_table_that_leads_beyond_its_end_is_damage(tmp_path: Path) -> None:
    table = struct.pack("<4I", *[897960687] * 4)
    (tmp_path / "spiece.model").write_bytes(
        spiece_of(PIECES[:-1]) + field(3, field(2, struct.pack("<I", len(table)) + table))
    )
    with pytest.raises(ModelFileError, match=r"index out of bounds.*the file is damaged, fetch it again"):
        T5Tokenizer(tmp_path).encode("a cat")


def test_a_vocabulary_that_is_a_pipe_is_waited_for_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t5.model")
    with pytest.raises(ModelFileError, match="no plain file"):
        T5Tokenizer(tmp_path / "t5.model").encode("x")


def test_a_score_beyond_any_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not T5's vocabulary"):
        T5Tokenizer(tokenizer_json(tmp_path, pieces=[["<pad>", 10**400]])).encode("x")


@given(data=st.binary(max_size=60))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert parse_spiece(data).pieces


def test_where_the_vocabulary_is_looked_for(tmp_path: Path) -> None:
    checkpoint = tmp_path / "models" / "sd3.safetensors"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    flux = tmp_path / "flux"
    tokenizer_json(flux / "tokenizer", kind="BPE", pieces={"a": 0})  # CLIP's
    with pytest.raises(ModelFileError) as caught:
        find_vocabulary([checkpoint, flux], "model.t5_vocabulary")
    text = str(caught.value)
    for part in ("spiece.model", "tokenizer.json", "google/t5-v1_1-xxl", str(checkpoint.parent), "model.t5_vocabulary"):
        assert part in text
    in_folder = tokenizer_json(flux / "tokenizer_2")
    assert find_vocabulary([checkpoint, flux], "x") == in_folder
    tokenizer_json(flux / "tokenizer_2", kind="BPE", pieces={"a": 0})  # of SD3 that is bigG's
    in_folder = tokenizer_json(flux / "tokenizer_3")
    assert find_vocabulary([checkpoint, flux], "x") == in_folder
    beside = checkpoint.parent / "spiece.model"
    beside.write_bytes(spiece_of(PIECES[:-1]))
    assert find_vocabulary([checkpoint, flux], "x") == beside
    with pytest.raises(ModelFileError, match=r"spiece\.model: cannot be read"):
        T5Tokenizer(tmp_path).encode("x")


def test_the_shipped_vocabulary_is_for_encoders_of_the_published_size(tmp_path: Path) -> None:
    assert find_vocabulary([tmp_path], "x", PUBLISHED_ROWS) == SHIPPED
    with pytest.raises(ModelFileError, match="found none in"):
        find_vocabulary([tmp_path], "x", 384)
    beside = tokenizer_json(tmp_path)
    assert find_vocabulary([tmp_path], "x", PUBLISHED_ROWS) == beside


def test_umt5_has_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    """It begins with a piece more, and ComfyUI's file of the encoder holds it; T5's beside that file is not taken."""
    pieces = [*PIECES[:2], ("<s>", 0.0), *PIECES[2:-1]]
    file = tmp_path / "umt5_xxl_fp16.safetensors"
    save_file(file, {"spiece_model": np.frombuffer(spiece_of(pieces), np.uint8), "shared.weight": np.zeros(2)})
    (tmp_path / "spiece.model").write_bytes(spiece_of(PIECES[:-1]))
    assert find_vocabulary([file], "x", UMT5_ROWS) == file
    assert find_vocabulary([file], "x", PUBLISHED_ROWS) == tmp_path / "spiece.model"
    tokenizer = T5Tokenizer(file)
    assert tokenizer.encode("a cat") == [5, 8]
    assert tokenizer.encode("?") == [4, 3]  # of an unknown character
    assert len(tokenizer.vocabulary.pieces) == 311  # and the 300 sentinels
    (tmp_path / "spiece.model").write_bytes(spiece_of(pieces))
    assert find_vocabulary([file], "x", UMT5_ROWS) == tmp_path / "spiece.model"
    other = tmp_path / "other" / "umt5.safetensors"
    other.parent.mkdir()
    save_file(other, {"shared.weight": np.zeros(2)})
    with pytest.raises(ModelFileError, match=r"UMT5's vocabulary: expected .* found none in .*/other, nor a tensor"):
        find_vocabulary([other], "x", UMT5_ROWS)


def test_a_caption_of_wan_is_cleaned() -> None:
    assert cleaned(" a&amp;amp;b  c\n\u3000d ") == "a&b c d"


def test_the_shipped_vocabulary_is_that_of_t5() -> None:
    """Ids as google/t5-v1_1-xxl's own tokenizer has them, published in T5's documentation and tests."""
    tokenizer = T5Tokenizer(SHIPPED)
    assert len(tokenizer.vocabulary.pieces) == 32100
    assert tokenizer.encode("The house is wonderful.") == [37, 629, 19, 1627, 5]
    assert tokenizer.encode("translate English to German: ") == [13959, 1566, 12, 2968, 10]
    assert max(tokenizer.encode("<extra_id_0>")) == 32099
    # SentencePiece's ids, which the library's own reader of the file cuts otherwise: it rounds scores
    assert tokenizer.encode("-------") == [3, 18, 14817, 14817]


def test_cached_captions_stay_valid() -> None:
    """The fingerprint is part of the cache's keys."""
    assert T5Tokenizer(SHIPPED).fingerprint == "64115ea8a4bd1f92571d7b146120365a4e0ed50c924d3ac4bad49d71c841c6a0"


def test_the_folder_that_was_started_in_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=rf"found none in {re.escape(str(tmp_path))}\. The file"):
        find_vocabulary(["checkpoint.safetensors"], "x")


def test_a_vocabulary_that_is_named_is_that_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(spiece_of(PIECES[:-1]))
    named = tmp_path / "t5.model"
    with pytest.raises(ModelFileError, match=r"t5\.model: cannot be read"):
        named_vocabulary(named, "model.t5_vocabulary", 384)
    named.write_bytes(spiece_of(PIECES[:-1]))
    assert named_vocabulary(named, "x", 384) == named
    assert named_vocabulary(tmp_path, "x", 384) == tmp_path / "spiece.model"


def test_a_named_vocabulary_of_another_encoder_is_refused() -> None:
    """Its numbers would be plausible words, and the loss would look like one."""
    assert named_vocabulary(SHIPPED, "x", PUBLISHED_ROWS) == SHIPPED
    with pytest.raises(ModelFileError, match="expected UMT5's vocabulary, and it is T5's"):
        named_vocabulary(SHIPPED, "x", UMT5_ROWS)
