"""Conversions of OneTrainer's concepts and samples: how often each is shown, and what is done to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .conversions import number, prompts
from .onetrainer_values import resolutions
from .table import NOTHING, Convert, Lost, Source, is_off


def change(name: str) -> Any:
    """The largest change of an image's colours, in the folder's own unit."""

    def convert(value: Any, source: Source) -> Any:
        strength = source.get(f"image.random_{name}_max_strength", 0.0)
        return Lost(f"by at most {strength} there: set {name} of the folder by hand, as a share") if value else NOTHING

    return convert


def repeats(value: Any, source: Source) -> Any:
    count = float(value)
    if source.get("balancing_strategy", "REPEATS") == "SAMPLES":
        return Lost(f"{count:g} images of the folder in an epoch: set weight to {count:g} divided by their number")
    return int(count) if count == int(count) and count >= 1 else {"set.weight": count}


def overridden(value: Any, source: Source) -> Any:
    """The resolution of a folder of its own."""
    if is_off(value):
        return NOTHING
    found = resolutions(source.get("image.resolution_override", "512"), source)
    if isinstance(found, Mapping):
        return {"set.resolutions": found["data.resolutions"]}
    return found


def tags(convert: Convert) -> Convert:
    """A setting of changes to tags, where there are some."""

    def checked(value: Any, source: Source) -> Any:
        on = source.get("text.enable_tag_shuffling") or source.get("text.tag_dropout_enable")
        return convert(value, source) if on else NOTHING

    return checked


def dropped_tags(value: Any, source: Source) -> Any:
    """Tags that are left out: each by itself, or all beyond those that are kept."""
    share = float(source.get("text.tag_dropout_probability", 0.0))
    if is_off(value) or not share:
        return NOTHING
    mode = source.get("text.tag_dropout_mode", "FULL")
    if mode == "RANDOM":
        return {"set.captions.tag_dropout": share}
    if mode == "FULL" and not source.get("text.keep_tags_count", 1):
        return {"set.caption_dropout": share}
    return Lost(f"{mode.lower()}: captions.tag_dropout drops each tag alike, data.caption_dropout the whole caption")


def of_tags(value: Any, source: Source) -> Any:
    if is_off(value) or is_off(source.get("text.tag_dropout_enable")):
        return NOTHING
    return Lost("captions.protected are tags that always stay")


def concept_type(value: Any, source: Source) -> Any:
    if value in ("STANDARD", "", None):
        return NOTHING
    if value == "VALIDATION":
        return {"set.validation": True}
    if value == "PRIOR_PREDICTION":
        return {"set.regularization": True, "set.regularization_target": "base"}
    return Lost("expected STANDARD, VALIDATION or PRIOR_PREDICTION")


def as_set(answer: Any) -> Any:
    return answer if isinstance(answer, Mapping) else {"set.repeats": number(answer)}


def unmasked(value: Any, source: Source) -> Any:
    """The share of steps without masks."""
    if not source.get("masked_training") or is_off(value):
        return NOTHING
    return Lost(f"masks count in all steps here, and in {1 - float(value):.0%} of them there")


def with_masks(value: Any, source: Source) -> Any:
    """A setting of masks, where they are used."""
    return value if source.get("masked_training") and not is_off(value) else NOTHING


def samples(value: Any, source: Source) -> Any:
    """The samples that are on, each with its own size, seed and so on."""
    return prompts([_sample(one) for one in value if one.get("enabled", True)])


def _sample(one: Mapping[str, Any]) -> dict[str, Any]:
    found = {ours: one.get(theirs) for theirs, ours in _SAMPLE.items()}
    return found | {"seed": None if one.get("random_seed") else found["seed"]}


_SAMPLE: Final = {
    "prompt": "text",
    "negative_prompt": "negative",
    "width": "width",
    "height": "height",
    "seed": "seed",
    "diffusion_steps": "steps",
    "cfg_scale": "guidance_scale",
}
