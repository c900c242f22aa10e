"""How ai-toolkit's jobs are laid out, and conversions that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flame_train.errors import ConfigError

from .conversions import prompts as as_prompts
from .conversions import (
    sampled,
    sides_of,
)
from .encoders import trained
from .table import (
    NOTHING,
    Changed,
    Convert,
    Lost,
    Reading,
    Setting,
    Source,
    Tree,
    is_off,
)

_ARCHES: Final = {
    "sdxl": "sdxl",
    "sd3": "sd3",
    "flux": "flux",
    "flux_schnell": "flux",
    "flux_kontext": "flux",
    "zimage": "zimage",
    "flux2_klein_4b": "flux2",
    "flux2_klein_9b": "flux2",
    "krea2": "krea2",
    "anima": "anima",
    "chroma": "chroma",
    "qwen_image_2": "qwenimage",
    "qwen_image": "qwenimage1",
}
FLOW: Final = tuple(dict.fromkeys(family for family in _ARCHES.values() if family != "sdxl"))
_SWITCHES: Final = {"is_xl": "sdxl", "is_v3": "sd3", "is_sd3": "sd3", "is_flux": "flux"}
_OTHERS: Final = ("is_v2", "is_pixart", "is_pixart_sigma", "is_auraflow", "is_lumina2", "is_ssd", "is_vega")


def is_mine(tree: Tree) -> bool:
    config = tree.get("config")
    return (
        "job" in tree
        and isinstance(config, Mapping)
        and isinstance(config.get("process"), list)
        and bool(config["process"])
    )


def read(reading: Reading) -> Source:
    config = reading.tree["config"]
    at = ("config", "process", "[0]")
    process = config["process"][0]
    if not isinstance(process, Mapping):
        raise ConfigError(f"{reading.place(at)}: config.process: expected a table of settings")
    settings = reading.flat({name: value for name, value in process.items() if name != "datasets"}, at)
    settings["name"] = Setting(config.get("name", ""), reading.place(("config", "name")))
    job = str(settings.pop("type", Setting("sd_trainer", "")).value)
    if job not in ("sd_trainer", "ui_trainer", "diffusion_trainer", "sd_trainer_xl"):
        raise ConfigError(f"{reading.place(at)}: type = {job}: expected a job that trains a LoRA (sd_trainer)")
    if "network" not in process:
        raise ConfigError(f"{reading.place(at)}: expected a LoRA (network); training of whole models is not here")
    sets = []
    for i, dataset in enumerate(process.get("datasets") or []):
        own = _with_controls(reading.flat(dataset, (*at, "datasets", f"[{i}]")))
        weight = settings.get("train.reg_weight")
        sets.append(own | {"reg_weight": weight} if weight and own.get("is_reg") else own)
    return Source(_family(reading, settings), _named(settings), sets)


def _with_controls(dataset: dict[str, Setting]) -> dict[str, Setting]:
    """A set of images whose folders of control images, numbered or not, are one list."""
    named = [name for name in ("control_path", *(f"control_path_{n}" for n in (1, 2, 3))) if name in dataset]
    values = [dataset.pop(name) for name in named]
    folders = [
        folder for one in values for folder in (one.value if isinstance(one.value, list) else [one.value]) if folder
    ]
    return dataset | ({"control_path": Setting(folders, values[0].place)} if folders else {})


def _named(settings: dict[str, Setting]) -> dict[str, Setting]:
    """Settings with [name] and [trigger] put in."""
    words = {"[name]": settings["name"].value, "[trigger]": getattr(settings.get("trigger_word"), "value", None)}

    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(each) for each in value]
        if isinstance(value, str):
            for mark, word in words.items():
                value = value.replace(mark, str(word)) if word else value
        return value

    return {name: Setting(put(setting.value), setting.place) for name, setting in settings.items()}


def _family(reading: Reading, settings: Mapping[str, Setting]) -> str:
    arch = settings.get("model.arch")
    if arch and arch.value:
        name = str(arch.value).partition(":")[0].lower()
        if name not in _ARCHES:
            raise ConfigError(
                f"{arch.place}: arch = {arch.value}: expected one of {', '.join(_ARCHES)}; other families are not here"
            )
        return _ARCHES[name]
    for name in _OTHERS:
        if (other := settings.get(f"model.{name}")) and other.value:
            raise ConfigError(f"{other.place}: {name}: expected SDXL, SD3 or Flux; other families are not here")
    return next((family for name, family in _SWITCHES.items() if (s := settings.get(f"model.{name}")) and s.value), "")


def kind(value: Any, source: Source) -> Any:
    kind = str(value).lower()
    if kind == "lora" and not is_off(source.get("network.conv")) and source.family == "sdxl":
        return "locon"
    return kind if kind in ("lora", "locon", "lokr", "dora") else Lost(f"no such adapter here: {kind}")


def alpha(value: Any, source: Source) -> Any:
    """With PEFT's names, which flow models have, ai-toolkit trains with alpha = rank whatever the config says."""
    rank = source.get("network.rank") or source.get("network.linear") or 4
    if source.family in FLOW:
        return Changed(float(rank), "ai-toolkit ignores linear_alpha for flow models and trains with the rank")
    return float(value if value is not None else source.get("network.alpha", 1.0))


def targets(value: Any, source: Source) -> Any:
    if source.family == "sdxl":
        return ["full"] if not is_off(source.get("network.conv")) else ["attention+mlp", "*.proj_in", "*.proj_out"]
    return ["full"]


def lokr_full(value: Any, source: Source) -> Any:
    return value if str(source.get("network.type", "")).lower() == "lokr" else NOTHING


def levels(value: Any, source: Source) -> Any:
    """timestep_type; sigmoid is a logit-normal without a shift, shift has the model's."""
    if source.family == "sdxl":
        return NOTHING
    known = {"sigmoid": sampled("sigmoid", 1.0), "linear": sampled("uniform", 1.0), "shift": sampled("uniform", 0.0)}
    return known.get(value, Lost("expected sigmoid, linear or shift; the others are ai-toolkit's own"))


def ema(value: Any, source: Source) -> Any:
    return source.get("train.ema_config.ema_decay", 0.999) if value else NOTHING


def seed(value: Any, source: Source) -> Any:
    return NOTHING if value in (None, -1) else value


def negative(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    return Lost("Flux has no negative prompt") if source.family == "flux" else value


def prompts(value: Any, source: Source) -> Any:
    """A list of texts, or of tables; a seed of -1 is none."""
    return as_prompts([_prompt(each) for each in value or []])


def _prompt(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        return {"text": str(item)}
    found = {ours: item.get(theirs) for theirs, ours in _PROMPT.items()}
    shown = [file for name in _SHOWN if (file := item.get(name))]
    found |= {"control": shown} if shown else {}
    return found | {"seed": None if found["seed"] == -1 else found["seed"]}


_SHOWN: Final = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
_PROMPT: Final = {
    "prompt": "text",
    "neg": "negative",
    "width": "width",
    "height": "height",
    "seed": "seed",
    "guidance_scale": "guidance_scale",
    "sample_steps": "steps",
    "network_multiplier": "strength",
}


def trigger(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else {"captions.trigger": value, "output.trigger": value}


def walk(value: Any, source: Source) -> Any:
    return NOTHING if value else Lost("each image of a grid has the next seed")


def every(value: Any, source: Source) -> Any:
    return 0 if source.get("train.disable_sampling") else value


def quantized(value: Any, source: Source) -> Any:
    if not value:
        return NOTHING
    kind = str(source.get("model.qtype", "qfloat8"))
    if "8" in kind:
        return "int8" if "int8" in kind else "fp8"
    return Changed("nf4", f"fewer than 8 bits are nf4 here, {kind} there")


def offloaded(value: Any, source: Source) -> Any:
    share = float(source.get("model.layer_offloading_transformer_percent", 1.0))
    if not value or not share:
        return NOTHING
    found: dict[str, Any] = {"model.offload": share}
    if not source.get("train.gradient_checkpointing", True):
        found["gradient.checkpointing"] = "full"
    return Changed(found, "whole blocks, spread over the network")


def resolutions(value: Any, source: Source) -> Any:
    sides = sides_of(value)
    if len(sides) < 2 or not isinstance(value, list):
        return {"set.resolution": sides[0]} if sides else Lost("expected a number of pixels")
    return {"set.resolutions": sides}


def encoders(value: Any, source: Source) -> Any:
    """One switch for all text encoders; which of Flux's and SD3's it means is not told there."""
    if is_off(value):
        return NOTHING
    if source.family not in ("sdxl", "sd3", "flux"):
        return Lost("this family's text encoder gets no adapters here")
    if source.family != "sdxl":
        return Lost("one switch for all of them there; text_encoders.train names those that are trained")
    denoiser = source.get("train.unet_lr") or source.get("train.lr")
    rate = source.get("train.text_encoder_lr") or source.get("train.lr")
    return trained({"clip_l": rate, "clip_g": rate}, denoiser, "attention+mlp")


def kept(kind: str, prefix: str) -> Convert:
    """The switch of a preservation, with its weight, and the class of the trigger if it has one."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(value):
            return NOTHING
        found = {"preservation.kind": kind, "preservation.weight": float(source.get(f"{prefix}_multiplier", 1.0))}
        if kind == "class":
            found["preservation.class_word"] = str(source.get(f"{prefix}_class", "person"))
        return found

    return convert
