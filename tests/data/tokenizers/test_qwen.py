"""Qwen's tokens against transformers' tokenizer, made of the same merges; and the files they come from."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest

from flame_train.errors import ModelFileError
from flame_train.text_encoders.qwen3.encoder import THINKING, WITHOUT_THINKING
from flame_train.text_encoders.qwen3.tokenizer import PUBLISHED_ROWS, SHIPPED, QwenTokenizer, find_tokenizer

# the template that Qwen3's tokenizer_config.json has, for one message of a user
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
TRAPS = [
    "",
    " ",
    "\n",
    "\t\n  \r\n",
    "  leading and trailing  ",
    "A PHOTO OF SKS DOG, 8K!!!",
    "it's THEY'RE don't 'tis",
    "café naïve Ångström façade — déjà vu",
    "cafe\u0301 nai\u0308ve",
    "🐱 a cat 🐶🏽 family 👨‍👩‍👧‍👦",
    "猫の写真、東京タワー。",
    "고양이 사진",
    "кошка на крыше",
    "قطة على السطح",
    "חתול על הגג",
    "แมวบนหลังคา",
    "छत पर बिल्ली",
    "γάτα στη στέγη",
    "<|im_end|> a <think> b </think>",
    "<|endoftext|>",
    "hello\u00a0world\u2003wide\u200bzero\ufeffbom",
    "½ ² Ⅷ ﬁ",
    "a" * 300,
    "1,000,000 3.14159 1920x1080",
    "masterpiece,best quality,(detailed:1.2),[sketch],{{x}}",
    "\u0000nul",
    "İstanbul ǅ ß ẞ \u017f",
    "\U0001f9ff\U00010348",
    "word " * 700,
    "一幅为名为“造相「Z-IMAGE-TURBO」”的项目设计的创意海报",
]
SCRIPTS = [
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x370, 0x4FF),
    (0x590, 0x6FF),
    (0x900, 0xDFF),
    (0xE00, 0x10FF),
    (0x1E00, 0x2BFF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
]


def captions(count: int) -> list[str]:
    """The traps, then texts of words in many scripts."""
    rng = random.Random(3)

    def word() -> str:
        low, high = rng.choice(SCRIPTS)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 9)))

    joins = ["", " ", " ", "  ", "\n", ", ", "'s ", "\u0301", "42"]
    mixed = ["".join(word() + rng.choice(joins) for _ in range(rng.randint(1, 30))) for _ in range(count - len(TRAPS))]
    return TRAPS + mixed


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    lines = gzip.decompress(SHIPPED.read_bytes()).decode().split("\n")[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    letters = bytes_to_unicode().values()
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    made = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges, chat_template=TEMPLATE)
    plain = "im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start "
    plain += "vision_end vision_pad image_pad video_pad"
    made.add_tokens([f"<|{name}|>" for name in plain.split()], special_tokens=True)
    made.add_tokens(["<tool_call>", "</tool_call>", *(f"<|fim_{n}|>" for n in ("prefix", "middle", "suffix", "pad"))])
    made.add_tokens(["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    return made


def test_the_published_ids():
    ours = QwenTokenizer()
    assert (ours.pad, ours.encode("<|im_start|>"), ours.encode("</think>"), ours.rows) == (
        151643,
        [151644],
        [151668],
        151669,
    )


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.proof)])
@pytest.mark.parametrize("template", [THINKING, WITHOUT_THINKING], ids=["thinking", "without"])
def test_ids_are_those_of_transformers(theirs, template, count):
    ours, length = QwenTokenizer(), 512
    for text in captions(count):
        message = [{"role": "user", "content": text}]
        written = theirs.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, enable_thinking=template is THINKING
        )
        assert template.around(text) == written
        made = theirs(written, padding="max_length", max_length=length, truncation=True)
        row = ours.row(template.around(text), length)
        np.testing.assert_array_equal(row.ids, made["input_ids"], err_msg=repr(text))
        np.testing.assert_array_equal(row.mask, made["attention_mask"], err_msg=repr(text))


def test_cached_captions_stay_valid():
    """The fingerprint is part of the cache's keys."""
    assert QwenTokenizer().fingerprint == "1887cef65158bc7c8a17e4d3df5dd33263e95e87f8659137a2dbc417c7e6037e"


def test_what_does_not_fit_is_counted():
    row = QwenTokenizer().row("word " * 20, 8)
    assert row.mask.all()
    assert row.truncated == len(QwenTokenizer().encode("word " * 20)) - 8
    with pytest.raises(ValueError, match="at least 1"):
        QwenTokenizer().row("a", 0)


def test_a_tokenizer_beside_the_model_takes_its_place(tmp_path):
    content = json.loads(QwenTokenizer()._tokenizer.to_str())
    (tmp_path / "tokenizer").mkdir()
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert find_tokenizer([tmp_path], "x", PUBLISHED_ROWS) == path
    assert QwenTokenizer(path).encode("a cat") == QwenTokenizer().encode("a cat")
    assert QwenTokenizer(path).fingerprint != QwenTokenizer().fingerprint
    path.write_text(json.dumps({"model": {"type": "Unigram"}}))
    assert find_tokenizer([tmp_path], "x", PUBLISHED_ROWS) is None


def test_damaged_and_missing_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in ("{", '{"model": {"type": "Unigram"}}', '{"model": {"type": "BPE"}}'):
        path.write_text(content)
        with pytest.raises(ModelFileError, match="not Qwen's tokenizer"):
            QwenTokenizer(path).encode("a")
    with pytest.raises(ModelFileError, match="cannot be read"):
        QwenTokenizer(tmp_path / "none.json").encode("a")
    with pytest.raises(ModelFileError, match="an encoder of 300 rows"):
        find_tokenizer([tmp_path / "none" / "base.safetensors"], "text_encoders.qwen3", 300)
