"""ai-toolkit's jobs in YAML, whose layout EriDiffusion's jobs have too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.foreign.read_rows import read_table
from flame_train.errors import ConfigError
from flame_train.families import named_by

from . import distilled, sample_prompts
from .clips import OF_AI_TOOLKIT
from .conversions import format_of_comfyui, innermost, model_of_ai_toolkit, published, sampled, sides_of, trained
from .table import NOTHING, Changed, Convert, Lost, Program, Reading, Setting, Source, Tree, is_off

_ARCHES: Final = named_by("ai-toolkit")
_SWITCHES: Final = named_by("ai-toolkit switches")
_OTHERS: Final = ("is_pixart", "is_pixart_sigma", "is_auraflow", "is_lumina2", "is_ssd", "is_vega")


def _is_mine(tree: Tree) -> bool:
    config = tree.get("config")
    return (
        "job" in tree
        and isinstance(config, Mapping)
        and isinstance(config.get("process"), list)
        and bool(config["process"])
    )


def _read(reading: Reading) -> Source:
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
        sets.append(_with_controls(reading.flat(dataset, (*at, "datasets", f"[{i}]"))))
    return Source(_family(reading, settings), _named(settings), sets)


def _with_controls(dataset: dict[str, Setting]) -> dict[str, Setting]:
    """Returns a set of images whose folders of control images, numbered or not, are one list."""
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
        if isinstance(value, list | Mapping):
            return {k: put(v) for k, v in value.items()} if isinstance(value, Mapping) else list(map(put, value))
        for mark, word in words.items():
            value = value.replace(mark, str(word)) if word and isinstance(value, str) else value
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
            raise ConfigError(f"{other.place}: {name}: expected SDXL, SD, SD3 or Flux; other families are not here")
    return next((family for name, family in _SWITCHES.items() if (s := settings.get(f"model.{name}")) and s.value), "")


def kind(value: Any, source: Source) -> Any:
    kind = str(value).lower()
    if kind == "lora" and not is_off(source.get("network.conv")) and source.fact("unet"):
        return "locon"
    return kind if kind in ("lora", "locon", "lokr", "dora") else Lost(f"no such adapter here: {kind}")


def alpha(value: Any, source: Source) -> Any:
    """With PEFT's names, which flow models have, ai-toolkit trains with alpha = rank whatever the config says."""
    rank = source.get("network.rank") or source.get("network.linear") or 4
    if source.family in _ARCHES.values() and not source.fact("unet"):
        return Changed(float(rank), "ai-toolkit ignores linear_alpha for flow models and trains with the rank")
    return float(value if value is not None else source.get("network.alpha", 1.0))


def targets(value: Any, source: Source) -> Any:
    if source.fact("unet"):
        return ["full"] if not is_off(source.get("network.conv")) else ["attention+mlp", "*.proj_in", "*.proj_out"]
    return [source.fact("ai_toolkit_layers") or "full"]


def _batches(source: Source) -> int:
    """Returns how many steps there, of one batch each, make an update of the weights."""
    return max(1, int(source.get("train.gradient_accumulation_steps", 1)))


def updates(value: Any, source: Source) -> Any:
    """Steps as updates: with gradient_accumulation_steps a step there is one batch, and with no other key."""
    batches = _batches(source)
    if batches == 1 or is_off(value):
        return value
    return Changed(max(1, round(value / batches)), f"{value} steps there, of which {batches} are one update")


def accumulated(value: Any, source: Source) -> Any:
    if value == -1:
        return Lost("an update for each epoch; gradient.accumulation takes a number of batches")
    return value if value and value > 1 else NOTHING


def rate(value: Any, source: Source) -> Any:
    """Converts a learning rate; below 0.1 ai-toolkit gives Prodigy 1."""
    if str(source.get("train.optimizer", "")).lower().startswith(("prodigy", "dadapt")) and float(value) < 0.1:
        return Changed(1.0, f"ai-toolkit gives this optimizer 1 in place of {value}")
    return float(value)


def eps(value: Any, source: Source) -> Any:
    """Its Adams and Prodigies have 1e-6 where nothing is said."""
    name = str(source.get("train.optimizer", "adamw")).lower()
    return (
        1e-6 if name.startswith(("adam", "prodigy")) and source.get("train.optimizer_params.eps") is None else NOTHING
    )


def schedule(value: Any, source: Source) -> Any:
    """Returns a schedule.

    Restarts and T_0 are of the whole run, and linear rises from a third of the rate to all of it.
    """
    params = "train.lr_scheduler_params."
    if value == "constant_with_warmup":
        warmup = max(1, round(source.get(f"{params}num_warmup_steps", 1000) / _batches(source)))
        return {"schedule.name": "constant", "schedule.warmup_steps": warmup}
    if value == "linear":
        start, end = source.get(f"{params}start_factor", 1 / 3), source.get(f"{params}end_factor", 1.0)
        if start == 1 and end == 0:
            return {"schedule.name": "linear"}
        return Changed(
            {"schedule.name": "constant"},
            "the nearest here",
            (f"it goes from {start:.2g} of the rate to {end:.2g} of it over the run; constant is used instead",),
        )
    known = {"constant": "constant", "cosine": "cosine", "cosine_with_restarts": "cosine"}
    return {"schedule.name": known[value]} if value in known else Lost("write the schedule by hand; cosine is used")


def levels(value: Any, source: Source) -> Any:
    """Converts timestep_type; sigmoid is a logit-normal without a shift, shift has the model's."""
    if not is_off(source.get("train.linear_timesteps")) or not is_off(source.get("train.linear_timesteps2")):
        return NOTHING
    if value == "weighted":
        return weighted(value, source)
    known = {"sigmoid": sampled("sigmoid", 1.0), "linear": sampled("uniform", 1.0)}
    known |= dict.fromkeys(("shift", "flux_shift", "lumina2_shift"), sampled("uniform", 0.0))
    return known.get(
        value,
        Lost(
            "a distribution of ai-toolkit's own; the family's own is used instead. "
            'loss.timestep_sampling = "sigmoid" favours the middle, and loss.logit_mean moves it'
        ),
    )


def weighted(value: Any, source: Source) -> Any:
    """Returns even noise levels, whose losses are weighed by a table, with most weight in the middle."""
    if is_off(value):
        return NOTHING
    if source.fact("unet"):
        return NOTHING
    lost = (
        'even noise levels, the middle ones weighed more; all weigh the same here. loss.timestep_sampling = "sigmoid" '
        "draws the middle more often instead"
    )
    return Changed(sampled("uniform", 1.0), "without its weights", (lost,))


def span(name: str) -> Convert:
    """Returns the first or last place in a list of noise levels that begins with the noisiest, as a timestep."""

    def convert(value: Any, source: Source) -> Any:
        if value == (0 if name == "min" else 999):
            return NOTHING
        even = source.fact("unet") or source.get("train.timestep_type", "sigmoid") in ("linear", "weighted")
        if not even:
            return Lost("a place in a list of noise levels; loss.min_timestep and max_timestep are timesteps")
        return 1000 - value if name == "min" else 999 - value

    return convert


def content_or_style(value: Any, source: Source) -> Any:
    if value == "balanced":
        return NOTHING
    favoured, sign = ("noisy", "above") if value == "content" else ("clean", "below")
    return Lost(
        f"it draws {favoured} images more often, by a cube; they are drawn as loss.timestep_sampling says instead. "
        f"loss.logit_mean {sign} 0 favours the same ones"
    )


def regularization(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    weight = source.get("train.reg_weight")
    return {"set.regularization": True} | ({} if weight is None else {"set.regularization_weight": float(weight)})


def negative(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    return Lost("Flux has no negative prompt") if source.fact("guidance") else value


def quantized(value: Any, source: Source) -> Any:
    kind = _by_type(str(source.get("model.qtype", "qfloat8"))) if value else NOTHING
    told = 'products in int8, as there, are model.arithmetic = "int8"'
    return Changed(kind, told) if kind == "int8-convrot" else kind


def quantized_text(value: Any, source: Source) -> Any:
    """Converts the text encoders, which are as the model where nothing is said; CLIPs are not quantized."""
    if not value or source.fact("unet"):
        return NOTHING
    kind = _by_type(str(source.get("model.qtype_te", "qfloat8")))
    return Changed("int8", "text encoders are not rotated here") if kind == "int8-convrot" else kind


def _by_type(kind: str) -> Any:
    kind = kind.partition("|")[0]
    if "8" in kind:
        rotated = "convrot" in kind
        return "int8-convrot" if rotated else "int8" if "int8" in kind else "fp8"
    return Changed("nf4", f"fewer than 8 bits are nf4 here, {kind} there")


def text_offloaded(value: Any, source: Source) -> Any:
    if is_off(value) or is_off(source.get("model.layer_offloading")):
        return NOTHING
    return Lost("model.offload has one share, which is that of text encoders too while captions are encoded")


def offloaded(value: Any, source: Source) -> Any:
    share = float(source.get("model.layer_offloading_transformer_percent", 1.0))
    if not value or not share:
        return NOTHING
    keys: dict[str, Any] = {"model.offload": share}
    if not source.get("train.gradient_checkpointing", True):
        keys["gradient.checkpointing"] = "full"
    return Changed(keys, "whole blocks, spread over the network")


def resolutions(value: Any, source: Source) -> Any:
    sides = sorted(set(sides_of(value)))
    if len(sides) < 2 or not isinstance(value, list):
        return {"set.resolution": sides[0]} if sides else Lost("expected a number of pixels")
    return {"set.resolutions": sides}


def encoders(value: Any, source: Source) -> Any:
    """Converts one switch for all text encoders; which of Flux's and SD3's it means is not told there."""
    if is_off(value):
        return NOTHING
    if not source.fact("encoders"):
        return Lost("this family's text encoder gets no adapters here")
    if not source.fact("unet"):
        return Lost("one switch for all of them there; text_encoders.train names those that are trained")
    denoiser = source.get("train.unet_lr") or source.get("train.lr")
    rate = source.get("train.text_encoder_lr") or source.get("train.lr")
    return trained(dict.fromkeys(source.fact("encoders"), rate), denoiser, "attention+mlp")


def kept(kind: str, prefix: str) -> Convert:
    """Returns the switch of a preservation, with its weight, and the class of the trigger if it has one."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(value):
            return NOTHING
        keys = {"preservation.kind": kind, "preservation.weight": float(source.get(f"{prefix}_multiplier", 1.0))}
        if kind == "class":
            keys["preservation.class_word"] = str(source.get(f"{prefix}_class", "person"))
        return keys

    return convert


def edits(value: Any, source: Source) -> Any:
    """Converts the models that edit and have another's shapes; of Qwen-Image-Edit the window's names have the month."""
    name, _, month = str(value).partition(":")
    if name == "qwen_image_edit_plus":
        said = month or str(source.get("model.name_or_path", ""))
        return {"model.qwen_edit": innermost(said, "2509", "2511")}
    return {"model.kontext": True} if name == "flux_kontext" else NOTHING


def saved(value: Any, source: Source) -> Any:
    """Converts a format, which is of whole models there: a LoRA is written for ComfyUI."""
    lokr = str(source.get("network.type", "")).lower() == "lokr"  # which diffusers does not read
    return format_of_comfyui(source) if value == "diffusers" and not lokr else NOTHING


_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        **OF_AI_TOOLKIT,
        **distilled.OF_AI_TOOLKIT,
        "training_folder": lambda v, s: f"{v}/{s.get('name')}" if s.get("name") else v,
        "trigger_word": lambda v, s: NOTHING if is_off(v) else {"captions.trigger": v, "output.trigger": v},
        "network.type": kind,
        "alpha": alpha,
        "network.conv": lambda v, s: v if s.fact("unet") and v else NOTHING,
        "network.conv_alpha": lambda v, s: float(v) if s.fact("unet") and v else NOTHING,
        "(layers)": targets,
        "network.lokr_full_rank": lambda v, s: v if str(s.get("network.type", "")).lower() == "lokr" else NOTHING,
        "network.lokr_factor": lambda v, s: v if v and v > 0 else NOTHING,
        "updates": updates,
        "model.name_or_path": model_of_ai_toolkit,
        "save.save_format": saved,
        "train.gradient_accumulation_steps": accumulated,
        "train.gradient_accumulation": lambda v, s: v if v and v > 1 else NOTHING,
        "train.train_text_encoder": encoders,
        "train.noise_scheduler": lambda v, s: (
            Lost('model.prediction = "flow" trains SDXL on flow matching, if the checkpoint is of that kind')
            if v == "flowmatch" and s.fact("unet")
            else NOTHING
        ),
        "rate": rate,
        "(eps)": eps,
        "train.lr_scheduler": schedule,
        "train.max_grad_norm": lambda v, s: 0.0 if str(s.get("train.optimizer")).lower() == "adafactor" else float(v),
        "train.ema_config.use_ema": lambda v, s: s.get("train.ema_config.ema_decay", 0.999) if v else NOTHING,
        "train.optimal_noise_pairing_samples": lambda v, s: (
            NOTHING if not v or v == 1 else Changed(True, "pairs within a batch")
        ),
        "train.timestep_type": levels,
        "weighted": weighted,
        "train.min_denoising_steps": span("min"),
        "train.max_denoising_steps": span("max"),
        "save.push_to_hub": published("save.hf_repo_id", lambda s: s.get("save.hf_private") is False),
        "logging.use_wandb": lambda v, s: NOTHING if is_off(v) else s.get("logging.project_name", "ai-toolkit"),
        "train.content_or_style": content_or_style,
        "train.diff_output_preservation": kept("class", "train.diff_output_preservation"),
        "train.blank_prompt_preservation": kept("blank", "train.blank_prompt_preservation"),
        "model.arch": edits,
        "model.is_v_pred": lambda v, s: "v" if v and s.fact("unet") else NOTHING,
        "model.quantize": quantized,
        "(model.quantize_te)": lambda v, s: quantized_text(
            s.get("model.quantize_te", s.get("model.quantize", False)), s
        ),
        "model.layer_offloading": offloaded,
        "model.layer_offloading_text_encoder_percent": text_offloaded,
        "sample.sample_every": lambda v, s: 0 if s.get("train.disable_sampling") else updates(v, s),
        "train.skip_first_sample": lambda v, s: NOTHING if is_off(v) else False,
        "prompts": sample_prompts.of_ai_toolkit,
        "sample.fps": sample_prompts.rate_of_ai_toolkit,
        "sample.neg": negative,
        "sample.walk_seed": lambda v, s: NOTHING if v else Lost("each image of a grid has the next seed"),
        "mask_min_value": lambda v, s: v if s.get("mask_path") or s.get("alpha_mask") else NOTHING,
        "is_reg": regularization,
        "prior_reg": lambda v, s: (
            NOTHING if is_off(v) else {"set.regularization": True, "set.regularization_target": "base"}
        ),
        "resolution": resolutions,
    }
)

PROGRAM: Final = Program(
    "ai-toolkit",
    _is_mine,
    _read,
    cache(partial(read_table, "ai_toolkit", "ai-toolkit", _OWN)),
    "https://github.com/ostris/ai-toolkit/blob/27a03a9/toolkit/config_modules.py",
)
