"""Prompts as kohya's trainers write them: `a cat --n blurry --w 832 --h 1216 --d 7 --l 6.5 --s 28`, a line each.

What other programs read in a prompt, and this one draws as text, gets a notice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from flame_train.data.caption_formats import hidden

_FLAG = re.compile(r"(?:^|\s)--(?=[A-Za-z])")
_WORD = re.compile(r"([A-Za-z][\w-]*)(?:[\s=]+(.*))?", re.DOTALL)

Value = str | int | float

FLAGS: dict[str, tuple[str, Callable[[str], Value], str]] = {
    "n": ("negative", str, "text"),
    "w": ("width", int, "a whole number"),
    "h": ("height", int, "a whole number"),
    "d": ("seed", int, "a whole number"),
    "s": ("steps", int, "a whole number"),
    "l": ("guidance_scale", float, "a number"),
    "g": ("guidance_scale", float, "a number"),
    "ss": ("sampler", str, "a sampler"),
    "am": ("strength", float, "a number"),
    "ci": ("control", str, "a file"),
}
"""Flag -> the key of a prompt that it stands for, how its value is read, and what is expected."""

_KNOWN = ", ".join(f"--{flag} ({key})" for flag, (key, _, _) in FLAGS.items())


def has_flags(text: str) -> bool:
    """Says whether a string is read as a prompt with flags."""
    return _FLAG.search(text) is not None


def read_flags(line: str) -> dict[str, Any]:
    """Returns the keys of a prompt that a line writes.

    Raises ValueError for a flag that is unknown, twice there or no number.

    `--l` is the scale of classifier-free guidance and `--g` an input of Flux. Here they are one key. So
    `--l 1` beside `--g`, which is without classifier-free guidance, says nothing.
    """
    text, *parts = _FLAG.split(line)
    prompt: dict[str, Any] = {"text": text.strip()}
    flags: dict[str, Value] = {}
    for part in parts:
        flag, value = _flag(part)
        if flag in flags:
            raise ValueError(f"--{flag} is there twice")
        flags[flag] = value
    if flags.get("l") == 1.0 and "g" in flags:
        del flags["l"]
    if "l" in flags and "g" in flags:
        raise ValueError("expected --l or --g, got both: here they are one guidance_scale")
    return prompt | {FLAGS[flag][0]: value for flag, value in flags.items()}


def _flag(part: str) -> tuple[str, Value]:
    match = _WORD.fullmatch(part.strip())
    flag = match.group(1) if match else part.split(maxsplit=1)[0]
    if match is None or flag not in FLAGS:
        raise ValueError(f"unknown flag --{flag}; known are {_KNOWN}")
    _, read, expected = FLAGS[flag]
    raw = (match.group(2) or "").strip()
    try:
        value = read(raw)
    except ValueError:
        value = ""
    if value == "" and flag != "n":
        raise ValueError(f"--{flag}: expected {expected}, got {raw!r}")
    return flag, value


_ANY_FLAG: Final = "|".join(FLAGS)
_READ_ELSEWHERE: Final = (
    (rf"(?:^|(?<=\s))-(?:{_ANY_FLAG})[\s=]+\S+", "a flag has two dashes"),
    (rf"(?:^|(?<=\s))[\u2013\u2014]+\s?(?:{_ANY_FLAG})[\s=]+\S+", "a flag has two dashes, which an editor joined"),
    (r"\[(?:trigger|name)\]", "captions alone replace it: write the word"),
    (r"\bTRIGGER\b", "init's sign for a word of yours: write it"),
    (r"[(\[][^()\[\]]*:\s*[-+]?\d+(?:\.\d+)?\s*[)\]]", "no weights are read"),
    (r"\(\([^()]+\)\)|\[(?!(?:trigger|name)\])[^\[\]]+\]", "no weights are read"),
    (r"\\[()\[\]]", "no backslash is needed"),
    (r"\bBREAK\b", "no part of a prompt is encoded alone"),
    (r"<\w+:[^<>]+>", "--lora of sample names LoRAs"),
    (r"__[\w/-]+__|\{[^{}]*\|[^{}]*\}", "only captions have wildcards"),
    (r"^\s*(?:Negative prompt:.*|Steps: \d+,.*)", "a negative prompt is --n TEXT"),
)


def unread(prompts: Iterable[str]) -> str:
    """One line on what is drawn as text in `prompts`; empty if nothing looks like a setting."""
    reasons: dict[str, str] = {}
    for text in prompts:
        for pattern, reason in _READ_ELSEWHERE:
            if match := re.search(pattern, text):
                reasons.setdefault(reason, match.group().strip()[:40])
        if unseen := hidden(text):
            reasons.setdefault("nobody sees it", unseen)
    listed = ", ".join(f"{match!r} ({reason})" for reason, match in reasons.items())
    return f"prompts hold what other programs read and this one draws as text: {listed}" if listed else ""
