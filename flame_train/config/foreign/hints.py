"""Sentences about other trainers' settings, for somebody who writes one into a config of flame-train."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from . import ai_toolkit, diffusion_pipe, onetrainer, sd_scripts, simpletuner

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
