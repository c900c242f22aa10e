"""Prompts of sample images in other trainers' configs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from flame_train.config.prompts import read_flags

from .clips import fitting
from .conversions import number
from .table import NOTHING, Changed, Convert, Lost, Nothing, Source, is_off


def at_first(prompts_key: str) -> Convert:
    """Returns the switch of a grid before the first step, which is off there and on here, where there are prompts."""
    return lambda value, source: NOTHING if is_off(source.get(prompts_key)) else bool(value)


def prompts(items: list[dict[str, Any]]) -> Any:
    """Prompts with what each has of its own. One that cannot be read here is lost, and the others stay."""
    filled = [{name: value for name, value in item.items() if value not in (None, "")} for item in items]
    readable, lost = [], []
    for item in (item for item in filled if item.get("text")):
        try:
            read_flags(item["text"])
        except ValueError as error:
            lost.append(f"the prompt {item['text'][:60]!r}: {error}")
        else:
            readable.append(item if len(item) > 1 else item["text"])
    if not readable:
        return Lost("; ".join(lost)) if lost else NOTHING
    return Changed(readable, "", tuple(lost)) if lost else readable


def of_ai_toolkit(value: Any, source: Source) -> Any:
    """Converts a list of texts with flags, or of tables; a seed of -1 is none."""
    lost: list[str] = []
    answer = prompts([_of_ai_toolkit(each, lost, source) for each in value or []])
    if not lost or isinstance(answer, Nothing | Lost):
        return answer
    return (
        Changed(answer.value, answer.remark, (*answer.lost, *lost))
        if isinstance(answer, Changed)
        else Changed(answer, "", tuple(lost))
    )


def _of_ai_toolkit(item: Any, lost: list[str], source: Source) -> dict[str, Any]:
    """Returns one prompt as keys of ours; the flags in its text win."""
    table = dict(item) if isinstance(item, Mapping) else {"prompt": str(item)}
    text, *flags = str(table.get("prompt") or "").split("--")
    table["prompt"] = text.strip()
    for flag in flags:
        name, _, value = flag.strip().partition(" ")
        if name in _FLAGS:
            table[_FLAGS[name]] = value.strip()
        else:
            lost.append(f"--{name} of the prompt {text.strip()[:40]!r}: no such flag here; the prompt stays without it")
    keys = {ours: number(table.get(theirs)) for theirs, ours in _AI_TOOLKIT.items()}
    shown = [str(file) for name in _CONTROLS if (file := table.get(name))]
    keys |= {"text": table["prompt"], "control": shown} if shown else {"text": table["prompt"]}
    if int(number(table.get("num_frames")) or 1) > 1:
        fits = fitting(number(table["num_frames"]), source)
        keys |= {"frames": fits[-1]} if fits else {}
        lost += [] if fits else [f"num_frames of the prompt {text.strip()[:40]!r}: clips need a model of video"]
    return keys | {"seed": None if keys["seed"] == -1 else keys["seed"]}


_CONTROLS: Final = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")


_AI_TOOLKIT: Final = {
    "neg": "negative",
    "width": "width",
    "height": "height",
    "seed": "seed",
    "guidance_scale": "guidance_scale",
    "sample_steps": "steps",
    "network_multiplier": "strength",
}


_FLAGS: Final = {
    "n": "neg",
    "w": "width",
    "h": "height",
    **dict.fromkeys(("d", "seed"), "seed"),
    **dict.fromkeys(("l", "cfg"), "guidance_scale"),
    **dict.fromkeys(("s", "steps"), "sample_steps"),
    **dict.fromkeys(("m", "network_multiplier"), "network_multiplier"),
    **dict.fromkeys(("frames", "num_frames"), "num_frames"),
    "ctrl_img": "ctrl_img",
}
"""The flags in a prompt's text, by the keys of a table of samples."""


def of_onetrainer(value: Any, source: Source) -> Any:
    """Converts the samples that are on, each with its own size, seed and so on."""
    return prompts([_of_onetrainer(one) for one in value if one.get("enabled", True)])


def _of_onetrainer(one: Mapping[str, Any]) -> dict[str, Any]:
    keys = {ours: one.get(theirs) for theirs, ours in _ONETRAINER.items()}
    return keys | {"seed": None if one.get("random_seed") else keys["seed"]}


_ONETRAINER: Final = {
    "prompt": "text",
    "negative_prompt": "negative",
    "width": "width",
    "height": "height",
    "seed": "seed",
    "diffusion_steps": "steps",
    "cfg_scale": "guidance_scale",
}


def of_sd_scripts(value: Any, source: Source) -> Any:
    """Converts a file of prompts, or the prompts themselves, one a line, as a web interface has them."""
    text = str(value or "")
    if "\n" not in text and (not text or os.path.splitext(text)[1].lower() in (".txt", ".toml", ".json")):
        return text or NOTHING
    lines = [line.strip() for line in text.splitlines()]
    return {"sample.prompts": [line for line in lines if line and not line.startswith("#")]}
