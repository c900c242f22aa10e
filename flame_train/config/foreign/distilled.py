"""What other trainers do on distilled models: adapters that are there in training alone, and contrastive guidance."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any, Final

from flame_train.families import family_data, training_adapters

from .conversions import HUB_NAME, hub_file
from .table import NOTHING, Changed, Lost, Source, is_off


def training_adapter(value: Any, source: Source) -> Any:
    """Converts an adapter's file, or its repository on the hub, which is written with the file that it is known for."""
    text = str(value or "")
    if not HUB_NAME.fullmatch(text) or text.endswith(".safetensors") or os.path.exists(text):
        return hub_file(value, source)
    known = [one["file"] for one in training_adapters(source.family) if one["file"].startswith(f"hf:{text}/")]
    return known[0] if known else f"hf:{text}"


def assistant(value: Any, source: Source) -> Any:
    """Converts the adapter of training, a repository and its file; a distilled flavour has one of its own."""
    if source.get("disable_assistant_lora"):
        return NOTHING
    models = family_data(source.family).get("simpletuner", {})
    named, all_own = source.get("pretrained_model_name_or_path"), models.get("assistants", {})
    own = all_own.get(str(source.get("model_flavour") or (None if named else models.get("usual"))))
    if own is None:
        theirs = " or ".join(all_own) or "none of this family"
        return Lost(f"SimpleTuner adds one where model_flavour is {theirs}") if value else NOTHING
    path, file = str(value or own.rpartition("/")[0]), source.get("assistant_lora_weight_name")
    if file and path and not path.endswith(".safetensors"):
        path = f"{path}/{file}"
    elif not value:
        path = own
    return training_adapter(path, source)


def guidance_loss(value: Any, source: Source) -> Any:
    """Converts contrastive guidance, with its scale, or two of them, and the schedule."""
    if is_off(value):
        return NOTHING
    scale = source.get("train.guidance_loss_target", 3.0)
    keys: dict[str, Any] = {
        "loss.contrastive_scale": sorted(float(s) for s in scale) if isinstance(scale, list) else float(scale)
    }
    if source.get("train.guidance_loss_schedule") == "sigma":
        keys["loss.contrastive_schedule"] = "sigma"
    return Changed(keys, "compared without its guidance, a loss smaller by the square of the scale")


OF_AI_TOOLKIT: Final = MappingProxyType(
    {
        "train.do_guidance_loss": guidance_loss,
        "train.unconditional_prompt": lambda v, s: (
            Lost("without a prompt is an empty caption here") if v and s.get("train.do_guidance_loss") else NOTHING
        ),
    }
)
