"""What looks like a setting in a prompt and is drawn as text: other programs read it, and this one does not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from flame_train.config.prompt_flags import FLAGS
from flame_train.data.captions import hidden

_FLAG: Final = "|".join(FLAGS)
_READ_ELSEWHERE: Final = (
    (rf"(?:^|(?<=\s))-(?:{_FLAG})[\s=]+\S+", "a flag has two dashes"),
    (rf"(?:^|(?<=\s))[\u2013\u2014]+\s?(?:{_FLAG})[\s=]+\S+", "a flag has two dashes, which an editor joined"),
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
    told: dict[str, str] = {}
    for text in prompts:
        for pattern, reason in _READ_ELSEWHERE:
            if found := re.search(pattern, text):
                told.setdefault(reason, found.group().strip()[:40])
        if unseen := hidden(text):
            told.setdefault("nobody sees it", unseen)
    listed = ", ".join(f"{found!r} ({reason})" for reason, found in told.items())
    return f"prompts hold what other programs read and this one draws as text: {listed}" if listed else ""
