"""SimpleTuner's config in JSON, with the data backends and the LyCORIS config that it names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.foreign.read_rows import read_table
from flame_train.errors import ConfigError
from flame_train.families import family_data, named_by

from . import distilled, sample_prompts
from .clips import OF_SIMPLETUNER
from .conversions import (
    checkpoint,
    min_snr,
    number,
    of_library,
    published,
    sampled,
    schedule,
    side,
    sides_of,
    swapped,
    to_number,
    unless_off,
    warmup,
    where,
)
from .simpletuner_files import sets_of, unpack_lycoris
from .table import NOTHING, Changed, Convert, Lost, Program, Reading, Setting, Source, Tree, facts_of, is_off, keep

_FAMILIES: Final = named_by("SimpleTuner")
_A_FILE: Final = "text_encoders.t5 names a file, or a folder on this machine"
_TARGETS: Final = {
    "all": "attention",
    "all+ffs": "attention+mlp",
    "all+ffs+embedder": "attention+mlp",
    "context+ffs": "attention+mlp",
    "ai-toolkit": "full",
}
_TEXTS: Final = MappingProxyType({"true": True, "false": False})  # which its command line reads as switches


def _plain(tree: Tree) -> dict[str, Any]:
    """Returns the settings without dashes; a config of its web interface has them in a table of their own."""
    inner = tree.get("config")
    if isinstance(inner, Mapping) and "_metadata" in tree:
        tree = inner
    return {name.lstrip("-"): value for name, value in tree.items()}


def _is_mine(tree: Tree) -> bool:
    own = ("model_family", "model_type", "data_backend_config", "lora_type", "validation_prompt")
    return sum(name in _plain(tree) for name in own) >= 2


def _read(reading: Reading) -> Source:
    inner = isinstance(reading.tree.get("config"), Mapping) and "_metadata" in reading.tree
    at = ("config",) if inner else ()
    written = reading.tree["config"] if inner else reading.tree
    settings = {
        name.lstrip("-"): Setting(_TEXTS.get(str(value).strip().lower(), value), reading.place((*at, name)))
        for name, value in written.items()
        if not name.startswith("_")
    }
    family = settings.get("model_family")
    if family and family.value not in _FAMILIES:
        raise ConfigError(f"{family.place}: model_family = {family.value}: expected one of {', '.join(_FAMILIES)}")
    kind = settings.get("model_type")
    if kind and kind.value != "lora":
        raise ConfigError(f"{kind.place}: model_type = {kind.value}: expected lora; a LoRA alone is trained here")
    flavour = settings.get("model_flavour")
    if flavour and str(flavour.value).startswith("edit") and flavour.value not in _EDITS:
        raise ConfigError(f"{flavour.place}: model_flavour = {flavour.value}: this model is not trained here")
    if (control := settings.get("controlnet")) and control.value:
        raise ConfigError(f"{control.place}: controlnet: a ControlNet is not trained here")
    notes: list[str] = []
    unpack_lycoris(reading, settings, notes)
    name = _FAMILIES[family.value] if family else ""
    return Source(name, settings, sets_of(reading, settings, notes, bool(facts_of(name).get("frame_stride"))), notes)


def kind(value: Any, source: Source) -> Any:
    if value == "standard":
        return "dora" if source.get("use_dora") else NOTHING
    algo = str(source.get("lycoris.algo", ""))
    if not algo:
        return Lost("LyCORIS, whose config is not beside this file")
    return algo if algo in ("lora", "locon", "loha", "lokr") else Lost(f"LyCORIS' {algo} is not here")


def of_standard(convert: Convert) -> Convert:
    """Returns a setting of PEFT's adapters, which LyCORIS does not read."""

    def checked(value: Any, source: Source) -> Any:
        return NOTHING if source.get("lora_type") == "lycoris" else convert(value, source)

    return checked


def alpha(value: Any, source: Source) -> Any:
    return float(value if value is not None else source.get("lora_rank", 16))


def targets(value: Any, source: Source) -> Any:
    if str(source.get("lora_type", "standard")) == "lycoris":
        return ["attention"]
    if value not in _TARGETS:
        return Lost("no such choice of layers here: write globs into lora.targets")
    usual: list[str] | None = source.fact("simpletuner_layers")
    return usual or [_TARGETS[value]]


def lycoris_rank(value: Any, source: Source) -> Any:
    """Converts a rank; one above every layer's means matrices that are not decomposed, in LoKr."""
    if source.get("lycoris.algo") == "lokr" and value >= 4096:
        return {"lora.full_matrix": True}
    return {"lora.rank": value}


def levels(value: Any, source: Source) -> Any:
    """Returns sigmoid of a normal number, shifted; or uniform, or by a beta distribution. A uniform one wins."""
    shift = 0.0 if source.get("flow_schedule_auto_shift") else float(source.get("flow_schedule_shift", 3))
    if source.get("flow_use_uniform_schedule"):
        return sampled("uniform", shift)
    if source.get("flow_use_beta_schedule"):
        shape = {f"loss.beta_{ours}": float(source.get(f"flow_beta_schedule_{name}", 2.0)) for ours, name in _BETA}
        return sampled("beta", shift) | shape
    return sampled("logit_normal", shift, float(source.get("flow_sigmoid_scale", 1.0)))


_BETA: Final = (("a", "alpha"), ("b", "beta"))
_PERIODIC: Final = ("cosine", "cosine_with_restarts", "cosine_with_warmup", "sine")
"""Schedules whose period is lr_warmup_steps, and which have no warm-up."""


def scheduled(value: Any, source: Source) -> Any:
    """Converts a schedule by its name; of the periodic ones those that begin anew are here."""
    if value == "polynomial":
        return {"schedule.name": "polynomial", "schedule.power": float(source.get("lr_power", 0.8))}
    if value not in _PERIODIC:
        return schedule(value, source)
    period, steps = number(source.get("lr_warmup_steps", 0)), number(source.get("max_train_steps", 0))
    if value == "cosine_with_restarts" and period and steps:
        return {"schedule.name": "cosine_restarts", "schedule.cycles": max(1, round(steps / period))}
    if period == steps:
        return {"schedule.name": "cosine"}
    reason = (
        f"the rate falls and rises again with a period of lr_warmup_steps = {period}; one fall over the run instead"
    )
    return Changed({"schedule.name": "cosine"}, "the nearest here", (reason,))


def ema(value: Any, source: Source) -> Any:
    if not value:
        return NOTHING
    decay, every = float(source.get("ema_decay", 0.995)), source.get("ema_update_interval", 1)
    lost = () if every in (1, None) else (f"an update each {every} steps; here each step has one",)
    return Changed(decay, "", lost) if lost else decay


def loss(value: Any, source: Source) -> Any:
    """Converts a loss; its delta follows the noise level unless it is constant."""
    if value not in _HUBERS:
        return NOTHING if value in ("l2", "", None) else Lost("no such loss here")
    how = source.get("huber_schedule", "snr")
    if how == "snr" and not source.fact("unet"):
        reason = "huber_schedule = snr, whose delta has another formula there for models of flow matching"
        return Changed({"loss.kind": value}, "with a constant delta", (reason,))
    return {"loss.kind": value, "loss.huber_schedule": how}


_HUBERS: Final = ("huber", "smooth_l1")


def offset(value: Any, source: Source) -> Any:
    """Returns offset noise, on a share of the batches."""
    if not value:
        return NOTHING
    share = float(source.get("noise_offset_probability", 0.25))
    lost = () if share == 1 else (f"on {share:.0%} of the batches, and here on all; make loss.offset_noise smaller",)
    return Changed(float(source.get("noise_offset", 0.1)), "", lost)


def epochs(value: Any, source: Source) -> Any:
    """Epochs, where no number of steps ends the run."""
    return NOTHING if is_off(value) or not is_off(number(source.get("max_train_steps"))) else number(value)


def drawn(value: Any, source: Source) -> Any:
    """Converts the chance of a set to give the next batch, whatever its size; of one set alone it changes nothing."""
    if value in (1, "", None) or (len(source.sets) < 2 and value != 0):
        return NOTHING
    return Lost(
        f"{value} of the draws, whatever the set's size; weight and repeats count showings in an epoch: set them"
    )


def cropped(value: Any, source: Source) -> Any:
    """Crops; its word False is a text, and so a crop."""
    if not value:
        return NOTHING
    aspect, style = source.get("crop_aspect", "square"), source.get("crop_style", "random")
    if aspect != "preserve":
        return Lost(f"images are cut to shape ({aspect}), and go into buckets of their own here; cut them beforehand")
    if style in ("center", "centre"):
        return NOTHING
    return {"set.random_crop": True} if style == "random" else Lost("crops are centred, or anywhere with random_crop")


def quantized(value: Any, source: Source) -> Any:
    """Converts a number format, whose name begins with the kind of number and its bits."""
    if value in ("no_change", None, ""):
        return NOTHING
    found = re.match(r"u?(int|fp|nf)(\d+)", str(value))
    if found is None:
        return Lost(f"no such number format here: {value}")
    if found[0].removeprefix("u") in ("int8", "fp8", "nf4"):
        return found[0].removeprefix("u")
    return NOTHING if int(found[2]) > 8 else Changed("nf4", f"fewer than 8 bits are nf4 here, {value} there")


def guidance(value: Any, source: Source) -> Any:
    if value != "constant":
        low, high = source.get("flux_guidance_min", 0.0), source.get("flux_guidance_max", 4.0)
        return Lost(f"a number between {low} and {high} for each image; loss.guidance_scale is one for all, 1")
    return float(source.get("flux_guidance_value", 1.0))


def prediction(value: Any, source: Source) -> Any:
    return {
        "its family's": "v" if source.get("model_family") == "sd2x" else NOTHING,
        "epsilon": NOTHING,
        "v_prediction": "v",
        "flow_matching": NOTHING if not source.fact("unet") else "flow",
    }.get(value, Lost("epsilon, v and flow are here"))


def clip(value: Any, source: Source) -> Any:
    """Converts max_grad_norm, the largest norm or value as grad_clip_method says."""
    name = "gradient.clip_value" if source.get("grad_clip_method", "value") == "value" else "gradient.clip_norm"
    return {name: float(value)} | ({"gradient.clip_norm": 0.0} if name.endswith("value") else {})


def sizes(value: Any, source: Source) -> Any:
    first, *others = str(value).split(",") if "x" in str(value) else [value]
    if not (sides := sides_of(first)):
        return Lost("expected a size such as 1024x1024")
    size = {"sample.width": sides[0], "sample.height": sides[-1] if len(sides) < 3 else sides[0]}
    more = (f"each prompt also at {', '.join(others)}; a prompt has a width and a height of its own",)
    return Changed(size, "", more) if others else size


def interval(older: str = "") -> Convert:
    """Returns the conversion of an interval, of which 0 is never, unless its `older` name has one."""

    def convert(value: Any, source: Source) -> Any:
        steps = number(value)
        if not is_off(steps):
            return steps
        return 0 if steps == 0 and is_off(source.get(older)) else NOTHING

    return convert


def base_of(source: Source) -> Any:
    """Returns the model that is named, or the repository of the flavour; None where it is not known."""
    models = family_data(source.family).get("simpletuner", {})
    flavour = str(source.get("model_flavour") or models.get("usual"))
    return source.get("pretrained_model_name_or_path") or models.get("flavours", {}).get(flavour)


def base_model(value: Any, source: Source) -> Any:
    if value:
        return checkpoint(value, source)
    if repository := base_of(source):
        return Changed(f"hf:{repository}", "SimpleTuner's own choice for this family")
    flavour = source.get("model_flavour") or family_data(source.family).get("simpletuner", {}).get("usual")
    return Lost(f"no model is named, and {flavour} is none that is known here") if flavour else NOTHING


def resolution(value: Any, source: Source) -> Any:
    """Pixels, or megapixels of an area; of `pixel` they are the shorter side."""
    size = number(value)
    if isinstance(size, int | float) and size < 64:
        return round((size * 1e6) ** 0.5 / 64) * 64
    if source.get("resolution_type") != "pixel":
        return side(value, source)
    reason = "resolution_type = pixel: the shorter side of an image there, and of a square of its area here"
    return Changed(side(value, source), "", (reason,))


def not_local(value: Any, source: Source) -> Any:
    if value == "local":
        return NOTHING
    return Lost(f"images from {value}: download them into a folder, and name it in data.path")


def negative(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    if source.fact("guidance"):
        return Lost("Flux has no negative prompt")
    return Lost("with a guidance of 1 no model sees it") if source.get("validation_guidance") == 1 else value


def tracked(value: Any, source: Source) -> Any:
    """Converts --report_to: TensorBoard, or the project at Weights & Biases that --tracker_project_name names."""
    project = source.get("tracker_project_name") or "simpletuner-training"
    board, wandb = {"output.tensorboard": True}, {"output.wandb": project}
    known = {"tensorboard": board, "wandb": wandb, "all": board | wandb, "none": NOTHING}
    return known.get(value, Lost("output.tensorboard and output.wandb are what shows a run"))


_EPS: Final = MappingProxyType({"eps": 1e-6})
_USUAL: Final = MappingProxyType(
    {
        **dict.fromkeys(("", "adamw_bf16", "ao-adamw8bit", "bnb-adamw", "bnb-adamw8bit", "bnb-adamw8bit-paged"), _EPS),
        "optimi-adamw": MappingProxyType({"betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.0}),
        "prodigy": MappingProxyType({"betas": [0.9, 0.99]}),
    }
)
"""What its optimizers have (optimizer_param.py:191, 205, 315, 580, 728) that is another here."""

_EDITS: Final = {
    "kontext": {"model.kontext": True},
    "edit-v2": {"model.qwen_edit": "2509"},
    "edit-v3": {"model.qwen_edit": "2511"},
}
"""Flavours that edit. edit-v2+ gives 2509 the time 0 for control images, for which it was not made."""

_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        **OF_SIMPLETUNER,
        "pretrained_model_name_or_path": base_model,
        "assistant_lora_path": distilled.assistant,
        "text encoder": lambda v, s: NOTHING if v in ("", base_of(s)) else Lost(_A_FILE),
        "sides of Wan": lambda v, s: 64 if "5b" in str(s.get("model_flavour")) else 32,  # whatever the value is
        "quantized": quantized,
        "prediction_type": prediction,
        "rescale_betas_zero_snr": lambda v, s: True if v or s.get("model_family") == "sd2x" else NOTHING,
        "push_to_hub": published("hub_model_id", lambda s: s.get("model_card_private") is False),
        "lora_type": kind,
        "lycoris.linear_dim": lycoris_rank,
        "lycoris.factor": lambda v, s: v if s.get("lycoris.algo") == "lokr" and v > 0 else NOTHING,
        "lora_rank": of_standard(to_number),
        "lora_dropout": of_standard(unless_off),
        "lora_alpha": of_standard(alpha),
        "(lora_alpha)": lambda v, s: float(s.get("lora_rank", 16)),
        "targets": targets,
        "(optimizer's own)": of_library("optimizer", "", _USUAL),
        "lr_scheduler": scheduled,
        "lr_warmup_steps": lambda v, s: NOTHING if s.get("lr_scheduler") in _PERIODIC else warmup(v, s),
        "lr_num_cycles": where("lr_scheduler", ("cosine_with_hard_restarts",), keep),
        "lr_end": where("lr_scheduler", ("polynomial", *_PERIODIC), lambda v, s: float(v)),
        "max_train_steps": lambda v, s: NOTHING if is_off(number(v)) else number(v),
        "num_train_epochs": epochs,
        "max_grad_norm": clip,
        "use_ema": ema,
        "snr_gamma": lambda v, s: (
            min_snr(v, s)
            if not s.get("use_soft_min_snr")
            else {"loss.weighting": "soft_min_snr", "loss.snr_gamma": float(v)}
        ),
        "loss_type": loss,
        "huber_c": where("loss_type", _HUBERS, lambda v, s: float(number(v))),
        "flow_schedule_shift": levels,
        "flux_guidance_mode": guidance,
        "offset_noise": offset,
        "resolution": resolution,
        "lora_format": of_standard(lambda v, s: "kohya" if v == "comfyui" else "diffusers"),
        "report_to": tracked,
        "checkpoint_step_interval": interval("checkpointing_steps"),
        "validation_step_interval": interval(),
        "validation_prompt": lambda v, s: [v] if v else NOTHING,
        "validation_on_startup": sample_prompts.at_first("validation_prompt"),
        "validation_negative_prompt": negative,
        "validation_resolution": sizes,
        "validation_seed": lambda v, s: NOTHING if v is None else v,
        "musubi_blocks_to_swap": swapped("gradient_checkpointing"),
        "model_flavour": lambda v, s: _EDITS.get(str(v), NOTHING),
        "repeats": lambda v, s: int(number(v or 0)) + 1,
        "probability": drawn,
        "type": not_local,
        "crop": cropped,
    }
)

PROGRAM: Final = Program(
    "SimpleTuner",
    _is_mine,
    _read,
    cache(partial(read_table, "simpletuner", "SimpleTuner", _OWN)),
    "https://github.com/bghira/SimpleTuner/blob/bc8e6ab/simpletuner, files without a folder in "
    "simpletuner_sdk/server/services/field_registry/sections",
)
