"""The answer to a key that does not exist: the key that was meant, or a sentence about another trainer's setting."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from flame_train.config.foreign import ai_toolkit, diffusion_pipe, onetrainer, sd_scripts, simpletuner
from flame_train.config.keys import keys, sections

_IN_PLACE: Final = MappingProxyType(
    {
        "model.path": "model.checkpoint is the base model",
        "model.type": "not needed: the checkpoint says which family it is of; remove it",
        "model.arch": "not needed: the checkpoint says which family it is of; remove it",
        "model.family": "not needed: the checkpoint says which family it is of; remove it",
        "lora.type": "lora.kind says which kind of adapter",
        "lora.path": "lora.from is a finished LoRA that a run begins with",
        "optimizer.type": "optimizer.name says which optimizer",
        "schedule.type": "schedule.name says which schedule",
        "train.max_epochs": "train.epochs counts epochs, train.steps optimizer steps",
        "log_with": "output.tensorboard is a switch; wandb and others are not here, log.jsonl always is",
        "meta": "not needed: output.title, author and trigger go into the LoRA's metadata",
        "optimizer_args": "an optimizer's own settings are keys of [optimizer], by the names of the papers",
        "network_args": "a kind's own settings are keys of [lora], those of single layers [[lora.rules]]",
        "lr_scheduler_args": "a schedule's own settings are keys of [schedule]",
    }
)
"""By the whole path, or by the name where it stands anywhere."""


def sentence(path: str) -> str:
    """Says what to do instead of `path`, `section.name` or a bare name; "" where no table has a sentence."""
    name = path.rpartition(".")[2]
    exact = _IN_PLACE.get(path) or _IN_PLACE.get(name) or _sentences().get(name)
    return exact or next((words for pattern, words in _patterns().items() if fnmatchcase(name, pattern)), "")


@functools.cache
def _patterns() -> Mapping[str, str]:
    return MappingProxyType({row.key: row.say for row in sd_scripts.PROGRAM.table().rows if row.say and "*" in row.key})


@functools.cache
def _sentences() -> Mapping[str, str]:
    """By the name of the setting. sd-scripts' come first; of the others only names that mean one thing anywhere."""
    rows = [*sd_scripts.PROGRAM.table().rows, *sd_scripts.PROGRAM.table().set_rows]
    sentences = {row.key.rpartition(".")[2]: row.say for row in reversed(rows) if row.say}
    for program in (ai_toolkit.PROGRAM, onetrainer.PROGRAM, simpletuner.PROGRAM, diffusion_pipe.PROGRAM):
        for row in (*program.table().rows, *program.table().set_rows):
            name = row.key.rpartition(".")[2]
            if row.say and "_" in name and "*" not in name:
                sentences.setdefault(name, row.say)
    return MappingProxyType(sentences)


_PAGE = "docs/conventions.md says where settings of other trainers went"
_NOWHERE = f"; `flame-train init FAMILY` writes all there are, {_PAGE}"


def answer(path: str, lacking: Collection[str] = (), otherwise: str = _NOWHERE) -> str:
    """Says what a message about the unknown key `path` ends with.

    A setting of another trainer in another unit, with the opposite sense, that is always on or that is not here, gets
    a sentence. Else the keys that may have been meant are named, but none of `lacking`, those that the model's family
    does not have. Where there is neither, `otherwise`.
    """
    words = sentence(path)
    if words:
        return f"; {words}. {_PAGE}"
    return did_you_mean([key for key in nearest(path) if key not in lacking]) or otherwise


def nearest(path: str) -> list[str]:
    """Returns up to three valid keys that `path` (`section.name` or a bare name) may have meant, best first.

    If another trainer calls a key of this section by the very name, the answer is that key. Else it is:
    1. keys of this section that are spelled like it,
    2. keys of other sections that another trainer calls by the very name; without any, keys of that name,
    3. without any of these, keys that have a similar name here or in another trainer.
    """
    section, _, name = path.rpartition(".")
    every = sorted(keys().values(), key=lambda key: key.section != section)
    elsewhere = [key.path for key in every if name in key.aka]
    if at_home := [path for path in elsewhere if keys()[path].section == section]:
        return at_home[:2]
    paths = [key.path for key in every if key.section == section and _is_typo(name, key.name)]
    if elsewhere:
        return [*paths, *elsewhere][:2]
    paths += [key.path for key in every if name == key.name]
    if not paths:
        paths = [
            key.path for key in every if any(_is_typo(name, other) for other in (key.name, *key.aka) if len(other) > 2)
        ]
    paths = [path for path in paths if keys()[path].instead_of not in paths]
    return list(dict.fromkeys(paths))[:3]


def nearest_section(name: str) -> list[str]:
    """Returns up to two sections spelled like `name`."""
    return difflib.get_close_matches(name, sections(), n=2, cutoff=0.75)


def did_you_mean(candidates: list[str]) -> str:
    """Returns `; did you mean a or b?`, or "" without a candidate."""
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _is_typo(written: str, meant: str) -> bool:
    """Says whether one was written for the other by a slip: one edit away, or nearly the same letters."""
    if abs(len(written) - len(meant)) > max(1, len(meant) // 4):
        return False
    return _one_edit(written, meant) or difflib.SequenceMatcher(None, written, meant).ratio() >= 0.85


def _one_edit(a: str, b: str) -> bool:
    """Says whether a letter left out, put in, replaced, or exchanged with its neighbour makes `b` of `a`."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rests, right = a[start:], b[start:]
    if rests[1:] == right[1:] or rests[1:] == right or rests == right[1:]:
        return True
    return rests[:2] == right[:2][::-1] and rests[2:] == right[2:]
