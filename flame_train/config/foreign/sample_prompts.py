"""Prompts of sample images in other trainers' configs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from flame_train.config.prompts import read_flags

from .clips import count, fitting, rate
from .conversions import number
from .table import NO_CONTROL, NOTHING, Changed, Convert, Lost, Nothing, Source, is_off


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
    return _with_lost(answer, tuple(lost))


def _table(item: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns one prompt as a table of theirs, and its unknown flags; the flags in its text win."""
    table = dict(item) if isinstance(item, Mapping) else {"prompt": str(item)}
    text, *flags = str(table.get("prompt") or "").split("--")
    table["prompt"] = text.strip()
    unknown = []
    for flag in flags:
        name, _, value = flag.strip().partition(" ")
        if name in _FLAGS:
            table[_FLAGS[name]] = value.strip()
        else:
            unknown.append(f"--{name}")
    return table, unknown


def _of_ai_toolkit(item: Any, lost: list[str], source: Source) -> dict[str, Any]:
    """Returns one prompt as keys of ours, and puts what has none into `lost`."""
    table, unknown = _table(item)
    whose = f"of the prompt {table['prompt'][:40]!r}"
    lost += [f"{flag} {whose}: no such flag here; the prompt stays without it" for flag in unknown]
    lost += [f"{name} {whose}: no such key here" for name in table if name not in _READ and not is_off(table[name])]
    keys = {ours: number(table.get(theirs)) for theirs, ours in _AI_TOOLKIT.items()}
    shown = [str(file) for name in _CONTROLS if (file := table.get(name))]
    if shown and not source.may_have_controls:
        lost.append(f"ctrl_img {whose}: {NO_CONTROL}")
        shown = []
    keys |= {"text": table["prompt"], "control": shown} if shown else {"text": table["prompt"]}
    clips = bool(source.fact("frame_stride"))
    if (named := table.get("num_frames")) is not None:
        if not count(named):
            lost.append(f"num_frames {whose}: expected a whole number of 1 or more")
        elif clips:
            fits = fitting(named, source)[-1]
            keys |= {"frames": fits} if fits > 1 or count(source.get("sample.num_frames")) > 1 else {}
        elif count(named) > 1:
            lost.append(f"num_frames {whose}: clips need a model of video")
    if clips and _is_clip(table, source) and not is_off(own := number(table.get("fps"))) and own != _rate(source):
        lost.append(f"fps = {own} {whose}: samples have one rate here, sample.fps")
    return keys | {"seed": None if keys["seed"] == -1 else keys["seed"]}


def _is_clip(table: Mapping[str, Any], source: Source) -> bool:
    return count(table.get("num_frames", source.get("sample.num_frames"))) > 1


def _rate(source: Source) -> Any:
    """Returns the rate of all samples that are clips, or the one of those without their own; None where all are stills.

    ai-toolkit has 16 frames a second where nothing is said (toolkit/config_modules.py:99).
    """
    items = source.get("sample.samples", source.get("sample.prompts")) or [{}]
    clips = [table for table, _ in map(_table, items) if _is_clip(table, source)]
    usual = number(source.get("sample.fps", 16))
    rates = {number(table.get("fps", usual)) for table in clips}
    return rates.pop() if len(rates) == 1 else usual if rates else None


def rate_of_ai_toolkit(value: Any, source: Source) -> Any:
    """Converts the rate of samples, which a prompt may have of its own."""
    shared = _rate(source)
    if shared is None or not source.fact("frame_stride"):
        return NOTHING
    answer = rate("sample.fps", shared)
    return Changed(answer, "of all prompts that are clips") if shared != value and isinstance(answer, dict) else answer


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


_READ: Final = frozenset((*_AI_TOOLKIT, *_CONTROLS, "prompt", "num_frames", "fps"))


_FLAGS: Final = {
    "n": "neg",
    "w": "width",
    "h": "height",
    **dict.fromkeys(("d", "seed"), "seed"),
    **dict.fromkeys(("l", "cfg"), "guidance_scale"),
    **dict.fromkeys(("s", "steps"), "sample_steps"),
    **dict.fromkeys(("m", "network_multiplier"), "network_multiplier"),
    **dict.fromkeys(("frames", "num_frames"), "num_frames"),
    "fps": "fps",
    "ctrl_img": "ctrl_img",
}
"""The flags in a prompt's text, by the keys of a table of samples."""


def of_onetrainer(value: Any, source: Source) -> Any:
    """Converts the samples that are on, each with its own size, seed and so on."""
    on = [one for one in value if one.get("enabled", True)]
    answer = prompts([_of_onetrainer(one, source) for one in on])
    others = [one for one in on if source.fact("unet") and one.get("noise_scheduler", "DDIM") not in _SCHEDULERS]
    lost = tuple(
        f"noise_scheduler = {one['noise_scheduler']} of the prompt {str(one.get('prompt'))[:40]!r}: a prompt's sampler "
        f"is one of {', '.join(_SCHEDULERS.values())}"
        for one in others
    )
    return _with_lost(answer, lost)


def _with_lost(answer: Any, lost: tuple[str, ...]) -> Any:
    """Returns an answer with further reasons why parts of it are not carried."""
    if not lost or isinstance(answer, Nothing | Lost):
        return answer
    if isinstance(answer, Changed):
        return Changed(answer.value, answer.remark, (*answer.lost, *lost))
    return Changed(answer, "", lost)


def _of_onetrainer(one: Mapping[str, Any], source: Source) -> dict[str, Any]:
    keys = {ours: one.get(theirs) for theirs, ours in _ONETRAINER.items()}
    if source.fact("unet"):  # samplers of others do not read it
        keys["sampler"] = _SCHEDULERS.get(str(one.get("noise_scheduler")))
    return keys | {"seed": None if one.get("random_seed") else keys["seed"]}


_SCHEDULERS: Final = {"DDIM": "ddim", "EULER": "euler", "EULER_A": "euler_ancestral", "DPMPP": "dpmpp_2m"}
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
