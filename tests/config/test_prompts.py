"""Prompts as strings, with kohya's flags, as tables and as lines of a file."""

from __future__ import annotations

import re

import pytest

from flame_train.config.load import load
from flame_train.config.prompts import FLAGS, Prompt, read_flags, read_prompt_file, unread
from flame_train.config.render import resolved
from flame_train.errors import ConfigError
from flame_train.run.sampling.requests import with_prompts_of_file

GOOD = '[model]\ncheckpoint = "base.safetensors"\n[data]\npath = "photos"\n[output]\ndir = "run"\n'


@pytest.fixture
def write(tmp_path):
    def to(text, name="a.toml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return to


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a cat", {"text": "a cat"}),
        (
            "a cat --n blurry, bad --w 832 --h 1216 --d 7 --l 6.5 --s 28",
            {
                "text": "a cat",
                "negative": "blurry, bad",
                "width": 832,
                "height": 1216,
                "seed": 7,
                "guidance_scale": 6.5,
                "steps": 28,
            },
        ),
        ("  two-tone -- not a flag --d 3 ", {"text": "two-tone -- not a flag", "seed": 3}),
        ("a--w 3", {"text": "a--w 3"}),
        ("--n nothing but this", {"text": "", "negative": "nothing but this"}),
        ("x --l 1 --g 3.5", {"text": "x", "guidance_scale": 3.5}),
        ("x --g 2", {"text": "x", "guidance_scale": 2.0}),
        ("x --n", {"text": "x", "negative": ""}),
        ("x --d=5", {"text": "x", "seed": 5}),
        ("x --ss euler_a --am 0.5", {"text": "x", "sampler": "euler_a", "strength": 0.5}),
    ],
)
def test_a_line_is_read_as_kohya_reads_it(line, expected):
    assert read_flags(line) == expected


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("x --q 3", "unknown flag --q; known are --n \\(negative\\), --w"),
        ("x --cn pose.png", "unknown flag --cn"),
        ("x --w wide", "--w: expected a whole number, got 'wide'"),
        ("x --w", "--w: expected a whole number, got ''"),
        ("x --l 7,5", "--l: expected a number, got '7,5'"),
        ("x --d 1 --d 2", "--d is there twice"),
        ("x --l 7 --g 3", "expected --l or --g, got both"),
    ],
)
def test_a_flag_that_is_wrong_is_named(line, told):
    with pytest.raises(ValueError, match=told):
        read_flags(line)


def test_every_flag_is_a_key_of_a_prompt():
    assert {key for key, _, _ in FLAGS.values()} <= set(Prompt.model_fields)


def test_tables_and_strings_are_prompts_and_come_back_from_the_resolved_config(write):
    first = '[[sample.prompts]]\ntext = "a --w b"\nwidth = 64\nsampler = "Euler a"\nseed = 3\n'
    tables = first + '[[sample.prompts]]\ntext = "--n"\n'
    config = load(write(GOOD + tables))
    assert config.sample.prompts[0] == Prompt(text="a --w b", width=64, sampler="euler_ancestral", seed=3)
    assert load(write(resolved(config), "b.toml")).sample.prompts == config.sample.prompts
    strings = load(write(GOOD + '[sample]\nprompts = ["a cat", "a dog --w 64"]'))
    assert strings.sample.prompts == (Prompt(text="a cat"), Prompt(text="a dog", width=64))
    assert 'prompts = ["a cat", {text = "a dog", width = 64}]' in resolved(strings)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('[sample]\nprompts = ["ok", "x --q 1"]', "8: sample.prompts: .*; in sample.prompts 2: unknown flag --q"),
        ('[sample]\nprompts = ["x --w 30"]', "8: sample.prompts: .*; in sample.prompts 1: width: .*multiple of 8"),
        ('[[sample.prompts]]\ntext = "x"\nwdth = 64', "7: sample.prompts: .*; in sample.prompts 1: wdth: unknown key"),
        ('[[sample.prompts]]\ntext = "x"\nsampler = "lms"', "7: sample.prompts: .*; in sample.prompts 1: sampler: "),
        ('[[sample.prompts]]\ntext = "a\\u0000"', "7: sample.prompts: expected text, got a NUL character"),
    ],
)
def test_what_is_wrong_has_its_line_and_the_prompts_number(write, lines, told):
    with pytest.raises(ConfigError, match=told):
        load(write(GOOD + lines))


def test_a_file_is_read_line_by_line(write):
    path = write("# a comment\n\na cat --d 3\r\n  a dog\n", "prompts.txt")
    assert read_prompt_file(path) == (Prompt(text="a cat", seed=3), Prompt(text="a dog"))
    config = load(write(GOOD + f"[sample]\nprompts = ['first']\nprompt_file = '{path}'"))
    sample = with_prompts_of_file(config.sample)
    assert [prompt.text for prompt in sample.prompts] == ["first", "a cat", "a dog"]
    assert with_prompts_of_file(sample) == sample


def test_every_wrong_line_of_a_file_is_told_with_its_number(write):
    path = write("fine\nx --q 1\n# --q 2\ny --w 30 --s 0\n", "prompts.txt")
    with pytest.raises(ConfigError) as told:
        read_prompt_file(path)
    first, *rest = str(told.value).splitlines()
    assert first.startswith(f"{path}:2: unknown flag --q; known are ")
    assert all(line.startswith(f"{path}:4: ") for line in rest)
    assert len(rest) == 2


@pytest.mark.parametrize(
    ("name", "raw", "told"),
    [
        ("p.json", b"[]", "expected prompts, got none"),
        ("p.json", b'{"prompts": ["a"]}', "expected a list of prompts"),
        ("p.json", b"[3]", "expected a list of prompts"),
        ("p.toml", b'prompts = ["a"]', r"expected a table \[\[prompt.subset\]\] a prompt"),
        ("p.txt", b"# nothing\n", "expected prompts, got none"),
        ("p.txt", b"\xff\xfe", "expected UTF-8 text"),
        ("p.txt", b"a" * (1 << 20) + b"b", "larger than the 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, name, raw, told):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"sample\.prompt_file: .*{told}"):
        read_prompt_file(str(tmp_path / name))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompt_file(str(tmp_path / "gone.txt"))


TOML = """
[prompt]
width = 832
negative_prompt = "blurry"
[[prompt.subset]]
prompt = "a cat"
sample_steps = 28
scale = 6.5
[[prompt.subset]]
prompt = "a dog --w 3"
width = 64
seed = 7
sample_sampler = "euler_a"
scale = 1
guidance_scale = 3.5
"""
JSON = """[
  {"prompt": "a cat", "width": 832, "negative_prompt": "blurry", "sample_steps": 28, "scale": 6.5, "enum": 3},
  {"prompt": "a dog --w 3", "width": 64, "negative_prompt": "blurry", "seed": 7, "sample_sampler": "euler_a",
   "guidance_scale": 3.5},
  "a fox --d 5"
]"""


@pytest.mark.parametrize(("name", "text"), [("p.toml", TOML), ("p.json", JSON)])
def test_tables_are_read_as_kohya_reads_them(write, name, text):
    """What stands in a table is no flag, as there."""
    cat, dog, *more = read_prompt_file(write(text, name))
    assert cat == Prompt(text="a cat", width=832, negative="blurry", steps=28, guidance_scale=6.5)
    assert dog == Prompt(
        text="a dog --w 3", width=64, negative="blurry", seed=7, sampler="euler_ancestral", guidance_scale=3.5
    )
    assert more == ([Prompt(text="a fox", seed=5)] if name == "p.json" else [])


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("p.toml", '[prompt]\nwidth = 30\n[[prompt.subset]]\nprompt = "x"\n', [":2: width: .*multiple of 8"]),
        (
            "p.toml",
            '[[prompt.subset]]\nprompt = "x"\nsample_steps = 0\ncontrolnet_image = "pose.png"\n',
            [":3: steps: ", ":4: controlnet_image: unknown key"],
        ),
        ("p.toml", '[[prompt.subset]]\nprompt = "x"\n[[prompt.subset]]\nseed = 3\n', [":3: expected the key prompt"]),
        (
            "p.json",
            '[\n"fine",\n"x --q 1",\n{"prompt": "x",\n "scale": 0}\n]',
            [":3: unknown flag --q", ":5: guidance_scale: "],
        ),
        ("p.json", '[{"prompt": "x", "scale": 7, "guidance_scale": 3}]', [":1: expected scale or guidance_scale"]),
        ("p.json", '[{"prompt": "x", "text": "y"}]', [":1: text is there twice, under two names"]),
        ("p.json", "[", [":1: expected JSON, got a syntax error"]),
        ("p.toml", "[prompt", [":1:8: expected ] behind the section's name, got the end of the file"]),
    ],
)
def test_all_that_is_wrong_in_tables_is_told_with_its_line(write, name, text, told):
    path = write(text, name)
    with pytest.raises(ConfigError) as error:
        read_prompt_file(path)
    lines = str(error.value).splitlines()
    assert len(lines) == len(told)
    for line, pattern in zip(lines, told, strict=True):
        assert line.startswith(path)
        assert re.match(pattern, line.removeprefix(path)), line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a blue square -w 640 -h 1280 -s 4", "'-w 640' (a flag has two dashes)"),
        ("a cat \u2014w 640", "'\u2014w 640' (a flag has two dashes, which an editor joined)"),
        ("a (red:1.3) cat", "'(red:1.3)' (no weights are read)"),
        ("a ((red)) cat", "'((red))' (no weights are read)"),
        ("a cat, [low quality]", "'[low quality]' (no weights are read)"),
        ("[trigger], portrait", "'[trigger]' (captions alone replace it: write the word)"),
        ("TRIGGER, portrait", "'TRIGGER' (init's sign for a word of yours: write it)"),
        (r"zk \(series\)", r"'\\(' (no backslash is needed)"),
        ("a cat BREAK a dog", "'BREAK' (no part of a prompt is encoded alone)"),
        ("a cat <lora:zk:0.8>", "'<lora:zk:0.8>' (--lora of sample names LoRAs)"),
        ("a {red|blue} __animal__", "'{red|blue}' (only captions have wildcards)"),
        ("Negative prompt: bad", "'Negative prompt: bad' (a negative prompt is --n TEXT)"),
        ("zk\u200bfox", "\"U+200B after 'zk'\" (nobody sees it)"),
    ],
)
def test_what_only_looks_like_a_setting_is_told(text, told):
    assert unread(["a cat", text]) == f"prompts hold what other programs read and this one draws as text: {told}"


@pytest.mark.parametrize(
    "text",
    [
        "a well-lit cat - sitting (red, fluffy), 50mm: sharp",
        "at 10:30 (noon)",
        "zoë 👨\u200d👩 می\u200cخواهم",  # noqa: RUF001
        "x -wide 5",
    ],
)
def test_plain_text_is_not_told(text):
    assert unread([text]) == ""
