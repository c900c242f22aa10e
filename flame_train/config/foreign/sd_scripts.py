"""sd-scripts: its TOML, flat or in sections, its dataset TOML, and a saved command line.

Places are in kohya-ss/sd-scripts: scripts at its top, else in `library/` and `networks/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.command_line import SCRIPT
from flame_train.config.foreign.read_rows import read_table
from flame_train.errors import ConfigError
from flame_train.families import FAMILY_TITLES, named_by

from . import kohya_files as files
from . import sample_prompts
from . import sd_scripts_networks as networks
from .conversions import (
    number,
    number_format,
    one_of,
    published,
    sampled,
    sampled_as_flux,
    swapped,
    to_float,
    to_number,
    unless_off,
    where,
)
from .table import NOTHING, Changed, Convert, Lost, Program, Reading, Setting, Source, Tree, is_off, keep

_OWN_NAMES: Final = (
    *("pretrained_model_name_or_path", "network_alpha", "network_module", "network_dim"),
    *("train_data_dir", "output_name", "save_model_as", "dataset_config"),
)
_SCRIPTS: Final = named_by("sd-scripts")
TYPES: Final = named_by("sd-scripts types")
"""model_type of Flux (flux_train_utils.py:684), and model_train_type of the web interface lora-scripts."""
_MARKS: Final = MappingProxyType(
    {
        "anima_": ("qwen3", "llm_adapter_path"),
        "flux_": ("model_prediction_type", "guidance_scale", "ae"),
        "sd3_": ("clip_g", "training_shift", "t5xxl"),
    }
)
"""Options that a model alone has, by how its script's name begins; the first that match are it."""


def is_mine(tree: Tree) -> bool:
    """A command line, a dataset TOML, sections of the guides' names, or several of its own keys in any sections."""
    if str(tree.get(SCRIPT, "")).endswith("train_network.py"):
        return True
    datasets = tree.get("datasets")
    if isinstance(datasets, list) and any(isinstance(one, dict) and "subsets" in one for one in datasets):
        return True
    if any(name.endswith("_arguments") and isinstance(tree[name], Mapping) for name in tree):
        return True
    tables = [tree, *(one for one in tree.values() if isinstance(one, Mapping))]  # the names of sections mean nothing
    return sum(any(name in table for table in tables) for name in _OWN_NAMES) >= 2


def read(reading: Reading) -> Source:
    own = {name: value for name, value in reading.tree.items() if name not in ("general", "datasets")}
    settings = files.flat(reading, own)
    named = settings.get("config_file")
    if reading.script and named is not None:
        settings = files.of_config_file(reading, named) | settings
    notes: list[str] = []
    sets = files.sets_of(reading) or files.datasets_of(reading, settings, notes)
    settings.pop("dataset_config", None)
    return files.source_of(_family(reading, settings), settings, sets, notes, reading.folder)


def _family(reading: Reading, settings: dict[str, Setting]) -> str:
    """From the script's name, or the encoders and options that one family alone has; sd-scripts' config names none."""
    names = {name for name, setting in settings.items() if setting.value not in (None, "")}
    for key in ("model_type", "model_train_type"):
        if key in settings and settings[key].value not in ("", None):
            said = str(settings[key].value)
            if said not in TYPES:
                raise ConfigError(f"{settings[key].place}: {key} = {said}: no such family here")
            del settings[key]
            if key != "model_type" or said != "flux":
                return TYPES[said]
    if reading.script:
        for beginning, family in _SCRIPTS.items():
            if reading.script.startswith(beginning):
                return family
        raise ConfigError(f"{reading.file}: expected SDXL, SD, SD3, Flux or Anima, got a command of {reading.script}")
    if "cond_emb_dim" in names:
        raise ConfigError(f"{settings['cond_emb_dim'].place}: expected a LoRA, got a ControlNet-LLLite (cond_emb_dim)")
    if "sdxl" in settings and settings.pop("sdxl").value:  # the web interface's box
        return "sdxl"
    for script, marks in _MARKS.items():
        if names & set(marks):
            return _SCRIPTS[script]
    return _SCRIPTS["train_network"] if settings.get("v2") and settings["v2"].value else ""


_HUBERS: Final = ("huber", "smooth_l1")


def _loss(value: Any, source: Source) -> Any:
    kind = {"l2": "mse"}.get(str(value), str(value))
    if kind in _HUBERS and source.get("huber_schedule") is None:
        return {"loss.kind": kind, "loss.huber_schedule": "snr"}
    return kind if kind == "mse" else {"loss.kind": kind}


def _noise_levels(value: Any, source: Source) -> Any:
    """Converts --timestep_sampling; sigma draws from a table that --discrete_flow_shift shifted."""
    anima = bool(source.fact("sd_scripts_weighs_levels"))
    shift, std = source.get("discrete_flow_shift", 1.0 if anima else 3.0), _number_of(source, "sigmoid_scale", 1.0)
    scheme = source.get("weighting_scheme", "uniform")
    weight = {"loss.weighting": scheme} if anima and scheme in _WEIGHTS else {}
    if value == "sigma":
        density = _density(scheme, shift, source, -1.0)
        return density if isinstance(density, Lost) else density | weight
    if value == "flux_shift" and not source.fact("guidance"):
        answer = sampled_as_flux("sigmoid", source, std)
        return Changed(answer.value | weight, answer.remark)
    known = {
        "uniform": sampled("uniform", 1.0),
        "sigmoid": sampled("sigmoid", 1.0, std),
        "shift": sampled("sigmoid", shift, std),
        "flux_shift": sampled("sigmoid", 0.0, std),
    }
    if value not in known:
        return Lost("expected sigma, uniform, sigmoid, shift or flux_shift")
    return known[value] | weight


def _noise_levels_sd3(value: Any, source: Source) -> Any:
    """Converts --weighting_scheme, whose error is of the image: a weight of 1 / level^2 there is none here."""
    density = _density(value, source.get("training_shift", 1.0), source, 1.0)
    if isinstance(density, Lost) or value == "sigma_sqrt":
        return density
    return Changed(density, "there the loss of a level counts level^2 times as much, which is not here")


_WEIGHTS: Final = ("sigma_sqrt", "cosmap")


def _density(scheme: Any, shift: Any, source: Source, sign: float) -> Any:
    """Returns the density of levels of a --weighting_scheme; `sign` is -1 where they are counted from the end."""
    if scheme in ("none", "uniform", None, *_WEIGHTS):
        return sampled("uniform", shift)
    if scheme == "logit_normal":
        mean, std = sign * _number_of(source, "logit_mean", 0.0), _number_of(source, "logit_std", 1.0)
        return sampled("logit_normal", shift, std) | ({"loss.logit_mean": mean} if mean else {})
    if scheme == "mode":
        return sampled("mode", shift) | {"loss.mode_scale": _number_of(source, "mode_scale", 1.29)}
    return Lost("no such weighting_scheme here")


def _number_of(source: Source, name: str, usual: float) -> float:
    return float(number(source.get(name, usual)))


def _raw(value: Any, source: Source) -> Any:
    if value == "raw":
        return NOTHING
    return Lost(f"always raw here, not {value}; a learning rate found with that may not fit")


def _kept(value: Any, source: Source) -> Any:
    """Says how many checkpoints stay: all, or those of --save_last_n_*, so many or a span (train_util.py:5786)."""
    if not is_off(every := number(source.get("save_every_n_steps"))):
        span = number(source.get("save_last_n_steps"))
        return (
            0 if is_off(span) else Changed(span // every + 1, f"checkpoints: a span of {span} steps, one every {every}")
        )
    if is_off(number(source.get("save_every_n_epochs"))) and is_off(number(source.get("save_n_epoch_ratio"))):
        return NOTHING
    return number(source.get("save_last_n_epochs")) or 0


def _saved(value: Any, source: Source) -> Any:
    """Converts --save_n_epoch_ratio: so many checkpoints in all (train_network.py:981)."""
    epochs, count = number(source.get("max_train_epochs")), number(value)
    if is_off(count):
        return NOTHING
    if is_off(epochs):
        return Lost("an interval stands in checkpoint.every or checkpoint.every_epochs")
    return Changed(max(1, epochs // count), f"{count} of {epochs} epochs")


def _steps(value: Any, source: Source) -> Any:
    """Converts --max_train_steps, which --max_train_epochs overrides (train_network.py:799)."""
    if not is_off(number(source.get("max_train_epochs"))):
        return NOTHING
    if is_off(number(value)):
        return Lost("no steps are no training; set train.steps or train.epochs, or the default of train.steps holds")
    return number(value)


def _tracked(value: Any, source: Source) -> Any:
    """Converts --log_with: TensorBoard, or the project at Weights & Biases that --log_tracker_name names."""
    project = source.get("log_tracker_name") or "network_train"
    return {
        "tensorboard": {"output.tensorboard": True},
        "wandb": {"output.wandb": project},
        "all": {"output.tensorboard": True, "output.wandb": project},
    }.get(value, NOTHING)


def _of_wandb(value: Any, source: Source) -> Any:
    """Converts the run's name and key at Weights & Biases, which only a run that logs there reads."""
    used = source.get("log_with") in ("wandb", "all") and not is_off(value)
    return Lost("output.wandb names a project; its own tools have the key and the name") if used else NOTHING


def _unused_span(value: Any, source: Source) -> Any:
    """Converts the same of the span of noise levels, whose ends are 0 and 1000."""
    return NOTHING if number(value) == 1000 else _unused(value, source)


def _unused(value: Any, source: Source) -> Any:
    """Converts a setting of diffusion by noise prediction, which sd-scripts does not read for a model of flow."""
    title = source.fact("short_title") or FAMILY_TITLES[source.family]
    return NOTHING if is_off(number(value)) else Lost(f"sd-scripts does not use it for {title} either")


def _beside(other: str) -> Any:
    """Returns a setting that means something beside another one."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(number(value)) or is_off(number(source.get(other))):
            return NOTHING
        return value if isinstance(value, bool) else number(value)

    return convert


def _unsampled(value: Any, source: Source) -> Any:
    """Samples no images where prompts have no interval (train_util.py:6380)."""
    has_interval = any(not is_off(number(source.get(f"sample_every_n_{unit}"))) for unit in ("steps", "epochs"))
    return NOTHING if has_interval or is_off(source.get("sample_prompts")) else 0


def _discount(value: Any, source: Source) -> Any:
    """Converts --multires_noise_discount, which means something beside iterations and in noise prediction."""
    flow = source.family in (_SCRIPTS | TYPES).values() and not source.fact("unet")
    return NOTHING if flow or is_off(source.get("multires_noise_iterations")) else float(number(value))


_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "blocks_to_swap": swapped("gradient_checkpointing"),
        "unused": _unused,
        "network_module": networks.kind,
        "network_dim": networks.rank,
        "network_alpha": networks.alpha,
        "(layers)": networks.targets,
        "(rules)": networks.rules,
        "(kernels)": networks.kernels,
        "network_args.wd_on_output": networks.on_output,
        "(LoRA+)": networks.lora_plus,
        "base_weights": networks.merged_first,
        "(text encoders)": networks.encoders,
        "unet_lr": networks.rate,
        "learning_rate": networks.usual_rate,
        "optimizer_type": networks.optimizer,
        "optimizer_args.decouple": networks.decoupled,
        "lr_scheduler": networks.schedule,
        "lr_warmup_steps": networks.rise,
        "lr_scheduler_num_cycles": where("lr_scheduler", ("cosine_with_restarts",), to_number),
        "lr_scheduler_power": where("lr_scheduler", ("polynomial",), to_float),
        "lr_scheduler_timescale": where("lr_scheduler", ("inverse_sqrt",), unless_off),
        "lr_scheduler_min_lr_ratio": networks.least_rate,
        "lr_decay_steps": networks.decay,
        "max_train_steps": _steps,
        "gradient_checkpointing": lambda v, s: (
            NOTHING if is_off(v) else "offload" if s.get("cpu_offload_checkpointing") else "full"
        ),
        "loss_type": _loss,
        "huber_schedule": where("loss_type", _HUBERS, keep),
        "qwen3_max_token_length": lambda v, s: (
            NOTHING
            if number(v) in (None, 512)
            else Changed(number(v), "of Qwen3 and of T5's ids, which have one length here")
        ),
        "t5_max_token_length": lambda v, s: (
            NOTHING
            if number(v) in (None, number(s.get("qwen3_max_token_length", 512)))
            else Lost("text_encoders.qwen3_tokens is the length of both readings of a caption")
        ),
        "huber_c": where("loss_type", _HUBERS, to_float),
        "huber_scale": where("loss_type", _HUBERS, to_float),
        "timestep_sampling": _noise_levels,
        "weighting_scheme": _noise_levels_sd3,
        "of_flow_alone": lambda v, s: Lost("flow models alone have it in sd-scripts"),
        "model_prediction_type": _raw,
        "unused_span": _unused_span,
        "noise_offset_random_strength": _beside("noise_offset"),
        "adaptive_noise_scale": _beside("noise_offset"),
        "multires_noise_discount": _discount,
        "ip_noise_gamma_random_strength": _beside("ip_noise_gamma"),
        "save_n_epoch_ratio": _saved,
        "(checkpoints)": _kept,
        "sample_prompts": sample_prompts.of_sd_scripts,
        "(samples)": _unsampled,
        "sample_at_first": sample_prompts.at_first("sample_prompts"),
        "output_dir": lambda v, s: f"{v}/{s.get('output_name')}" if s.get("output_name") else v,
        "save_model_as": one_of({"safetensors": "kohya", None: "kohya"}, "files are always safetensors here"),
        "save_precision": lambda v, s: "fp32" if v is None else number_format(v, s),
        "log_with": _tracked,
        "wandb_*": _of_wandb,
        "huggingface_repo_id": published(
            "huggingface_repo_id", lambda s: s.get("huggingface_repo_visibility") == "public"
        ),
        "enable_bucket": files.bucketed,
        "min_bucket_reso": files.bucket_bound(256),
        "max_bucket_reso": files.bucket_bound(1024),
        "dropout": files.dropout,
        "prior_loss_weight": lambda v, s: (
            NOTHING if number(v) == 1 else Lost("there are no regularization images that it could weigh")
        ),
        "conditioning_data_dir": files.masks("data"),
        "(regularization)": files.weight,
        "validation_split": files.held_out,
        "N_name": files.named_folders,
    }
)


_OWN_OF_SETS: Final = MappingProxyType({"conditioning_data_dir": files.masks("set")})


PROGRAM: Final = Program(
    "sd-scripts",
    is_mine,
    read,
    cache(partial(read_table, "sd_scripts", "sd-scripts", _OWN, _OWN_OF_SETS)),
    "kohya-ss/sd-scripts@48d368f",
)
