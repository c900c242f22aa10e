"""Conversions that several tables share: names of optimizers, schedules and number formats, and units."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import PureWindowsPath
from types import MappingProxyType
from typing import Any, Final

from flame_train.families import family_data
from flame_train.io.json_values import number as bounded

from .table import NOTHING, Changed, Convert, Lost, Source, is_off

FP32, BF16, FP16 = "fp32", "bf16", "fp16"

_FORMATS: Final = MappingProxyType(
    {
        **dict.fromkeys(("fp32", "float32", "float", "float_32", "no", "fp32_tf32", "tfloat_32"), FP32),
        **dict.fromkeys(("bf16", "bfloat16", "bfloat_16"), BF16),
        **dict.fromkeys(("fp16", "float16", "half", "float_16"), FP16),
    }
)
_SCHEDULES: Final = MappingProxyType(
    {
        "constant_with_warmup": "constant",
        "cosine_with_restarts": "cosine_restarts",
        "cosine_with_hard_restarts": "cosine_restarts",
        "cosine_annealing": "cosine",
        "cosine_annealing_with_warm_restarts": "cosine_restarts",
    }
)
_OPTIMIZERS: Final = MappingProxyType(
    {
        "adamw_bf16": "adamw",
        "adamw_optimi": "adamw",
        "optimi-adamw": "adamw",
        "optimi-lion": "lion",
        "adam": "adamw",
        "adamw8bitkahan": "adamw8bit",
        "adam_8bit": "adamw8bit",
        "bnb-adamw8bit": "adamw8bit",
        "bnb-adamw8bit-paged": "adamw8bit",
        "ao-adamw8bit": "adamw8bit",
        "bnb-adamw": "adamw",
        "bnb-lion": "lion",
        "bnb-lion8bit": "lion",
        "bnb-lion8bit-paged": "lion",
        "lion_8bit": "lion",
        "came_8bit": "came",
        "adamw-schedulefree": "schedule_free_adamw",
        "schedule_free_adamw": "schedule_free_adamw",
        "prodigy_plus_schedule_free": "prodigy_schedule_free",
    }
)


def format_of_comfyui(source: Source) -> Any:
    """Returns the format of a LoRA for which ComfyUI has a table of this family: diffusers' where it has both."""
    known = family_data(source.family).get("comfyui", {}).get("dotted", not source.fact("unet"))
    return "diffusers" if known else Changed("kohya", "ComfyUI takes no other names of this model")


def number_format(value: Any, source: Source) -> Any:
    """Converts a number format by any program's name for it."""
    name = _FORMATS.get(str(value).lower())
    return name or Lost("no such number format here; bf16, fp16 and fp32 are there")


def optimizer(value: Any, source: Source) -> Any:
    """Converts an optimizer by any program's name for it, or Lost."""
    from flame_train.config.keys import keys

    key = keys()["optimizer.name"]
    name = str(value).rsplit(".", 1)[-1].lower().removeprefix("torch-")  # which SimpleTuner writes
    if name in key.choices:
        return name
    ours = _OPTIMIZERS.get(name) or key.known.get(name)
    if ours is None:
        return Lost(f"no such optimizer here; there are {', '.join(map(str, key.choices))}")
    return Changed(ours, f"the nearest to {value} here")


def schedule(value: Any, source: Source) -> Any:
    """Converts a learning-rate schedule by any program's name for it, or Lost."""
    from flame_train.config.keys import keys

    name = str(value).lower()
    name = _SCHEDULES.get(name, name)
    choices = keys()["schedule.name"].choices
    return name if name in choices else Lost(f"no such schedule here; there are {', '.join(map(str, choices))}")


def inverted(value: Any, source: Source) -> Any:
    """Converts a switch whose opposite is here."""
    return not value


def ending(value: Any, source: Source) -> Any:
    """Converts a file name ending, with its dot."""
    text = str(value)
    return text if text.startswith(".") else f".{text}"


def side(value: Any, source: Source) -> Any:
    """Returns a square's side for a resolution in any form: 1024, "1024", "1024,1024", "768x1344" or [1024, 1024]."""
    sides = sides_of(value)
    if not sides:
        return Lost("expected a number of pixels")
    if len(sides) == 1 or sides[0] == sides[1]:
        return sides[0]
    even = round((sides[0] * sides[1]) ** 0.5 / 8) * 8
    return Changed(even, f"the square of the same area as {sides[0]} x {sides[1]}; buckets keep each image's shape")


def sides_of(value: Any) -> list[int]:
    """Returns the numbers in a resolution."""
    parts = value if isinstance(value, list | tuple) else str(value).lower().replace("x", ",").split(",")
    numbers = [number(part) for part in parts]
    return [int(each) for each in numbers if isinstance(each, int | float) and each == int(each)]


def number(value: Any) -> Any:
    """Returns a number that is written as text, such as "1e-4"; anything else as it is, nan and beyond 1e100 too."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if bounded(number_of_text := kind(value)) is not None:
                return number_of_text
    return value.strip()


def warmup(value: Any, source: Source) -> Any:
    """Steps of a rise; a number below 1 is a share of the run."""
    steps = number(value)
    if not isinstance(steps, int | float):
        return Lost("expected a number of steps")
    if is_off(steps):
        return NOTHING
    return {"schedule.warmup": float(steps)} if steps < 1 else {"schedule.warmup_steps": int(steps)}


def min_snr(value: Any, source: Source) -> Any:
    """Returns min-SNR, which is a weighting with a key of its own."""
    if is_off(value):
        return NOTHING
    return {"loss.weighting": "min_snr", "loss.snr_gamma": float(number(value))}


def switched(value_on: Any) -> Any:
    """Returns the conversion of a switch that stands for a value of ours; off is ours by default."""

    def convert(value: Any, source: Source) -> Any:
        return NOTHING if is_off(value) else value_on

    return convert


def unless_off(value: Any, source: Source) -> Any:
    """Converts the value, where it is one; a 0 in a command is one."""
    return NOTHING if is_off(value) and value not in ("0", "0.0") else value


def sampled(name: str, shift: Any, std: float = 1.0) -> Any:
    """Returns how noise levels are drawn, with their shift and the width of a logit-normal."""
    keys = {"loss.timestep_sampling": name, "loss.shift": float(number(shift))}
    if std != 1.0:
        keys["loss.logit_std"] = std
    return keys


def sampled_as_flux(name: str, source: Source, std: float = 1.0) -> Any:
    """Noise levels with Flux's shift, which follows an image's size: Flux's own here, elsewhere one for all sizes."""
    if source.fact("guidance"):
        return sampled(name, 0.0, std)
    resolutions = [one["resolution"].value for one in source.sets if "resolution" in one]
    resolutions += [each for one in source.sets if "resolutions" in one for each in one["resolutions"].value]
    answers = [side(each, source) for each in resolutions] or [1024]
    sides = [each.value if isinstance(each, Changed) else int(each) for each in answers]
    pixels = sum(each * each for each in sides) / len(sides)
    shift = math.exp(0.5 + 0.65 * (pixels / 256 - 256) / (4096 - 256))
    remark = f"Flux's shift at {round(pixels**0.5)} x {round(pixels**0.5)} pixels; there it follows each image's size"
    return Changed(sampled(name, round(shift, 4), std), remark)


def one_of(names: Mapping[Any, Any], else_: str) -> Any:
    """Returns the conversion of a choice by a table of names; others are Lost for the reason `else_`."""

    def convert(value: Any, source: Source) -> Any:
        return names.get(value, Lost(else_))

    return convert


def of_library(named: str, prefix: str, defaults: Mapping[str, Mapping[str, Any]]) -> Convert:
    """The conversion of what an optimizer's library has where a config says nothing, which is not what it is here.

    Args:
        named: the setting with the optimizer's name.
        prefix: what its own settings begin with.
        defaults: an optimizer by its name in small letters -> our keys of it.
    """

    def convert(value: Any, source: Source) -> Any:
        values = defaults.get(str(source.get(named, "")).lower(), {})
        unset = {f"optimizer.{key}": each for key, each in values.items() if source.get(f"{prefix}{key}") is None}
        return unset or NOTHING

    return convert


OPTIMI: Final = MappingProxyType({"betas": [0.9, 0.99], "eps": 1e-6})
"""AdamW of optimi (optimi/adamw.py:52)."""

_SWITCHES: Final = MappingProxyType({"True": True, "False": False, "true": True, "false": False})


def own_key(value: Any, source: Source) -> Any:
    """Converts an optimizer's own setting: a number, a switch, or several numbers in one text."""
    if value is None:
        return NOTHING
    if isinstance(value, str) and "," in value:
        return [float(number(part)) for part in value.strip("()[] ").split(",")]
    return _SWITCHES.get(value, value) if isinstance(value, str) else value


def innermost(path: Any, *words: str) -> str:
    """Returns the one of `words` that the innermost part of a path has; the first of them if none has one."""
    parts = reversed(PureWindowsPath(str(path).lower()).parts)
    return next((word for part in parts for word in words if word in part), words[0])


HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""owner/name, as the hub has it."""


def checkpoint(value: Any, source: Source) -> Any:
    """Converts a checkpoint's path, or a name on the hub, which is written hf:owner/name here."""
    text = str(value or "")
    if not text:
        return NOTHING
    page, name = _HUB_PAGE.fullmatch(text), PureWindowsPath(text).name
    if page:  # whose files may be called as everybody's
        name = f"{page.group(1).partition('/')[2]}/{name}"
    if other := re.search(source.fact("names_of_others") or "(?!)", name):
        return Lost(f"{other.group(1)} is not trained here")
    if page:
        return f"hf:{page.group(1)}/{page.group(2)}"
    if HUB_NAME.fullmatch(text) and not text.endswith(".safetensors") and not os.path.exists(text):
        return Changed(f"hf:{text}", "a name on the hub; a folder of that name would be written without hf:")
    return text


def model_of_ai_toolkit(value: Any, source: Source) -> Any:
    """Converts a model; of the repository of all versions of Chroma it is a version's file, or the newest."""
    before, _, version = str(value).partition("lodestones/Chroma/v")
    if not before and version:
        return f"hf:lodestones/Chroma/chroma-unlocked-v{version}.safetensors"
    if value == "lodestones/Chroma":
        return Changed(f"hf:{value}", "there its newest chroma-unlocked-v*.safetensors: write its name behind a /")
    return checkpoint(value, source)


_HUB_PAGE: Final = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/(?:blob|resolve)/main/([\w./-]+)")
_HUB_FILE: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*/[\w.-]+")


def hub_file(value: Any, source: Source) -> Any:
    """Converts a file's path, or owner/name/file on the hub, which is written with hf: here."""
    text = str(value or "")
    if not text:
        return NOTHING
    return f"hf:{text}" if _HUB_FILE.fullmatch(text) and not os.path.exists(text) else text


_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def published(repository: str, is_public: Callable[[Source], bool]) -> Convert:
    """Returns the conversion of what turns an upload to the Hugging Face hub on; `repository` has the name.

    What is seen by everybody there only because nothing was said is private here.
    """

    def convert(value: Any, source: Source) -> Any:
        name = str(source.get(repository) or "")
        if is_off(value):
            return NOTHING
        if not _REPOSITORY.fullmatch(name):
            return Lost("output.hub names the owner too, owner/name")
        return {"output.hub": name} | ({"output.hub_public": True} if is_public(source) else {})

    return convert


def to_float(value: Any, source: Source) -> Any:
    """Converts a number as a float; nothing for an empty value."""
    return NOTHING if value in (None, "") else float(number(value))


def to_number(value: Any, source: Source) -> Any:
    """Converts a number; nothing for an empty value."""
    return NOTHING if value in (None, "") else number(value)


def where(setting: str, choices: Collection[Any], convert: Convert) -> Convert:
    """Returns the conversion of a setting that means something where another has one of `choices`."""

    def checked(value: Any, source: Source) -> Any:
        return convert(value, source) if source.get(setting) in choices else NOTHING

    return checked


def only_with(switch: str) -> Convert:
    """Returns a setting of a choice that is not here: it is told with its switch, and means nothing without."""

    def convert(value: Any, source: Source) -> Any:
        return NOTHING if is_off(source.get(switch)) else Lost(f"it belongs to {switch}")

    return convert


def seed(value: Any, source: Source) -> Any:
    """Converts a seed; -1 draws one."""
    return NOTHING if value in (None, -1) else value


def mask_folder(value: Any, source: Source) -> Any:
    """Converts a folder of masks of a set of images."""
    return NOTHING if is_off(value) else {"set.masks": "files", "set.mask_folder": value}


def sampler(value: Any, source: Source) -> Any:
    """Converts a sampler by any program's name for it, or Lost."""
    from flame_train.config.keys import keys

    key, name = keys()["sample.sampler"], str(value).lower()
    ours = name if name in key.choices else key.known.get(name)
    if ours is None and name in ("flowmatch", "k_euler"):
        return NOTHING
    if name in ("ddpm", "dpmsingle"):
        return Changed(ours, f"the nearest to {name} here")
    return ours or Lost(f"sample.sampler has {', '.join(map(str, key.choices))}")


def swapped(checkpointing: str) -> Convert:
    """Returns the conversion of a count of blocks that wait in host memory.

    `checkpointing` is the other program's switch for recomputation, which streamed blocks need here.
    """

    def convert(value: Any, source: Source) -> Any:
        if is_off(value):
            return NOTHING
        keys = {"model.offload": "auto"} | ({} if source.get(checkpointing) else {"gradient.checkpointing": "full"})
        return Changed(keys, "as many as the GPU's memory asks for, all of them recomputed")

    return convert


def trained(rates: Mapping[str, Any], denoiser: Any, targets: str) -> Any:
    """Returns the keys for text encoders with these learning rates.

    Args:
        rates: by encoder, its learning rate there; one that is off is not trained.
        denoiser: the learning rate that becomes `optimizer.lr`.
        targets: the preset of `text_encoders.targets` that chooses the layers that the program adapts.

    Returns:
        A mapping, with a remark where the encoders' rates differ, or NOTHING where none is trained.
    """
    used = {name: float(number(rate)) for name, rate in rates.items() if not is_off(number(rate))}
    if not used:
        return NOTHING
    shared = next(iter(used.values()))
    keys: dict[str, Any] = {"text_encoders.train": list(used), "text_encoders.targets": [targets]}
    if is_off(denoiser) or shared != float(number(denoiser)):
        keys["text_encoders.lr"] = shared
    others = [f'"{name}.*" {rate:g}' for name, rate in used.items() if rate != shared]
    remark = f"one rate for all here; [[lora.rules]] gives a rate of its own: {', '.join(others)}"
    return Changed(keys, remark) if others else keys
