"""How sd-scripts' files are laid out, and conversions that are its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.command_line import SCRIPT
from flame_train.errors import ConfigError

from .conversions import (
    number,
    sampled,
)
from .encoders import ENCODERS, trained
from .table import (
    NOTHING,
    Changed,
    Lost,
    Reading,
    Setting,
    Source,
    Tree,
    is_off,
    no_file,
)

_OWN_NAMES: Final = (
    "pretrained_model_name_or_path",
    "network_alpha",
    "network_module",
    "network_dim",
    "train_data_dir",
    "output_name",
    "save_model_as",
    "dataset_config",
)
_SCRIPTS: Final = MappingProxyType({"sdxl_": "sdxl", "flux_": "flux", "sd3_": "sd3"})
_FLUX: Final = (
    "model_prediction_type",
    "timestep_sampling",
    "discrete_flow_shift",
    "guidance_scale",
    "apply_t5_attn_mask",
)
_OF_SETS: Final = (
    "resolution",
    "enable_bucket",
    "bucket_no_upscale",
    "bucket_reso_steps",
    "min_bucket_reso",
    "max_bucket_reso",
    "caption_extension",
    "caption_dropout_rate",
    "shuffle_caption",
    "keep_tokens",
    "keep_tokens_separator",
    "caption_separator",
    "caption_tag_dropout_rate",
    "caption_prefix",
    "caption_suffix",
    "enable_wildcard",
    "flip_aug",
    "random_crop",
    "alpha_mask",
)
_LISTS: Final = ("network_args", "optimizer_args", "lr_scheduler_args")
HUBERS: Final = ("huber", "smooth_l1")
ENCODER_RATES: Final = ("text_encoder_lr", "text_encoder_lr1", "text_encoder_lr2", "text_encoder_lr3")


def is_mine(tree: Tree) -> bool:
    """A command line, a dataset TOML, sections of the guides' names, or several of its own keys at the top."""
    if str(tree.get(SCRIPT, "")).endswith("train_network.py"):
        return True
    datasets = tree.get("datasets")
    if isinstance(datasets, list) and any(isinstance(one, dict) and "subsets" in one for one in datasets):
        return True
    if any(name.endswith("_arguments") and isinstance(tree[name], Mapping) for name in tree):
        return True
    return sum(name in tree for name in _OWN_NAMES) >= 2


def read(reading: Reading) -> Source:
    own = {name: value for name, value in reading.tree.items() if name not in ("general", "datasets")}
    settings = {name.rpartition(".")[2]: setting for name, setting in reading.flat(own).items()}
    notes: list[str] = []
    sets = _sets(reading)
    named = settings.pop("dataset_config", None)
    if named and not sets:
        other = reading.beside(str(named.value))
        sets = _sets(other) if other else []
        if other is None:
            notes.append(no_file("dataset_config", named, "its folders are"))
    weight = settings.get("prior_loss_weight")
    if weight is not None:
        sets = [one | {"prior_loss_weight": weight} if "is_reg" in one else one for one in sets]
    if not sets and "train_data_dir" in settings:
        sets = _folders(settings)
    return Source(_family(reading, settings), _unpacked(settings), _filled_in(sets, settings), notes)


def _filled_in(sets: list[dict[str, Setting]], settings: dict[str, Setting]) -> list[dict[str, Setting]]:
    """The sets, with what the config says of all images where they say nothing; it is taken out of `settings`."""
    if not sets:
        return []
    names = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"} | {name: name for name in _OF_SETS}
    shared = {ours: settings.pop(theirs) for theirs, ours in names.items() if theirs in settings}
    return [shared | one for one in sets]


def _sets(reading: Reading) -> list[dict[str, Setting]]:
    """The subsets of a dataset TOML, each with what [general] and its dataset say."""
    found = []
    datasets = reading.tree.get("datasets")
    general = reading.tree.get("general", {})
    below = reading.flat(general, ("general",)) if isinstance(general, Mapping) else {}
    for i, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        at = ("datasets", f"[{i}]")
        own = reading.flat({name: value for name, value in dataset.items() if name != "subsets"}, at)
        for j, subset in enumerate(dataset.get("subsets", [])):
            found.append(below | own | reading.flat(subset, (*at, "subsets", f"[{j}]")))
    return found


def _folders(settings: dict[str, Setting]) -> list[dict[str, Setting]]:
    """The folders of train_data_dir and reg_data_dir, whose sub-folders say how often they are repeated."""
    found = [{"image_dir": settings.pop("train_data_dir"), "N_name": Setting(True, "")}]
    regularization = settings.pop("reg_data_dir", None)
    if regularization and regularization.value:
        weight = settings.get("prior_loss_weight", Setting(1.0, ""))
        marked = {"is_reg": Setting(True, regularization.place), "prior_loss_weight": weight}
        found.append({"image_dir": regularization, "N_name": Setting(True, ""), **marked})
    return found


def _unpacked(settings: dict[str, Setting]) -> dict[str, Setting]:
    """network_args = ["conv_dim=8"] as network_args.conv_dim, and so on; text that spells a number as one."""
    found = {}
    for name, setting in settings.items():
        if name in _LISTS:
            parts = setting.value if isinstance(setting.value, list) else str(setting.value).split()
            for part in map(str, parts):
                key, _, value = part.partition("=")
                found[f"{name}.{key.strip()}"] = Setting(number(value.strip(" \"'")), setting.place)
        else:
            found[name] = setting
    return found


def _family(reading: Reading, settings: Mapping[str, Setting]) -> str:
    """From the script's name, or the encoders and options that one family alone has; sd-scripts' config names none."""
    names = {name for name, setting in settings.items() if setting.value not in (None, "")}
    if settings.get("model_type") and settings["model_type"].value not in ("flux", "", None):
        raise ConfigError(
            f"{settings['model_type'].place}: model_type = {settings['model_type'].value}: no such family here"
        )
    if reading.script:
        for beginning, family in _SCRIPTS.items():
            if reading.script.startswith(beginning):
                return family
        raise ConfigError(f"{reading.file}: expected SDXL, SD3 or Flux, got a command of {reading.script}")
    if "cond_emb_dim" in names:
        raise ConfigError(f"{settings['cond_emb_dim'].place}: expected a LoRA, got a ControlNet-LLLite (cond_emb_dim)")
    if names & {"ae", *_FLUX}:
        return "flux"
    if names & {"clip_g", "training_shift", "t5xxl"}:
        return "sd3"
    if settings.get("v2") and settings["v2"].value:
        raise ConfigError(f"{settings['v2'].place}: expected SDXL, SD3 or Flux, got Stable Diffusion 2 (v2)")
    return ""


def kind(value: Any, source: Source) -> Any:
    module, algo = str(value), str(source.get("network_args.algo", "lora")).lower()
    if module.startswith("networks.lora") and module != "networks.lora_fa":
        return "locon" if not is_off(source.get("network_args.conv_dim")) else NOTHING
    if not module.startswith("lycoris"):
        return Lost(f"no such adapter here: {module}")
    if source.get("network_args.dora_wd") in (True, "True", "true"):
        return "dora" if algo in ("lora", "locon") else Lost(f"DoRA with {algo} is not here")
    return algo if algo in ("lora", "locon", "loha", "lokr") else Lost(f"LyCORIS' {algo} is not here")


_PRESETS: Final = MappingProxyType(
    {"full": "full", "full-lin": "attention+mlp", "attn-mlp": "attention+mlp", "attn-only": "attention"}
)


def targets(value: Any, source: Source) -> Any:
    """sd-scripts adapts every linear layer of the blocks, LyCORIS what its preset says."""
    if str(source.get("network_module", "")).startswith("lycoris"):
        preset = str(source.get("network_args.preset", "full"))
        return (
            [_PRESETS[preset]]
            if preset in _PRESETS
            else Lost(f"LyCORIS' preset {preset}: list the layers in lora.targets")
        )
    if source.family != "sdxl" or not is_off(source.get("network_args.conv_dim")):
        return ["full"]
    return ["attention+mlp", "*.proj_in", "*.proj_out"]


def loss(value: Any, source: Source) -> Any:
    kind = {"l2": "mse"}.get(str(value), str(value))
    if kind in HUBERS and source.get("huber_schedule") is None:
        return {"loss.kind": kind, "loss.huber_schedule": "snr"}
    return kind if kind == "mse" else {"loss.kind": kind}


def noise_levels_flux(value: Any, source: Source) -> Any:
    """--timestep_sampling; sigma draws from a table that --discrete_flow_shift shifted, by --weighting_scheme."""
    shift, std = source.get("discrete_flow_shift", 3.0), float(number(source.get("sigmoid_scale", 1.0)))
    if value == "sigma":
        scheme = source.get("weighting_scheme", "uniform")
        return _density(scheme, shift, source)
    known = {
        "uniform": sampled("uniform", 1.0),
        "sigmoid": sampled("sigmoid", 1.0, std),
        "shift": sampled("sigmoid", shift, std),
        "flux_shift": sampled("sigmoid", 0.0, std),
    }
    return known.get(value, Lost("expected sigma, uniform, sigmoid, shift or flux_shift"))


def noise_levels_sd3(value: Any, source: Source) -> Any:
    return _density(value, source.get("training_shift", 1.0), source)


def _density(scheme: Any, shift: Any, source: Source) -> Any:
    """--weighting_scheme: the density of levels, or a weight of each; logit_mean counts the other way there."""
    if scheme in ("none", "uniform"):
        return sampled("uniform", shift)
    if scheme in ("sigma_sqrt", "cosmap"):
        return {"loss.weighting": scheme} | sampled("uniform", shift)
    if scheme == "logit_normal":
        mean, std = -float(number(source.get("logit_mean", 0.0))), float(number(source.get("logit_std", 1.0)))
        return sampled("logit_normal", shift, std) | ({"loss.logit_mean": mean} if mean else {})
    if scheme == "mode":
        return sampled("mode", shift) | {"loss.mode_scale": float(number(source.get("mode_scale", 1.29)))}
    return Lost("no such weighting_scheme here")


def raw(value: Any, source: Source) -> Any:
    if value == "raw":
        return NOTHING
    return Lost(f"always raw here, not {value}; a learning rate found with that may not fit")


def kept(value: Any, source: Source) -> Any:
    """A span of steps or epochs as a number of checkpoints."""
    every = source.get("save_every_n_steps") or source.get("save_every_n_epochs")
    if is_off(value) or is_off(every):
        return NOTHING
    return Changed(max(1, math.ceil(number(value) / number(every))), f"checkpoints, one every {every}")


def steps(value: Any, source: Source) -> Any:
    return number(value) if is_off(source.get("max_train_epochs")) else NOTHING


def schedule_ratio(value: Any, source: Source) -> Any:
    peak = number(source.get("unet_lr") or source.get("learning_rate") or 0)
    return (
        NOTHING
        if is_off(number(value)) or not peak
        else Changed(float(number(value)) * peak, "a rate here, and no ratio")
    )


def bf16_master(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else Lost("adapters are always fp32 here")


def encoders(value: Any, source: Source) -> Any:
    """CLIPs are trained unless --network_train_unet_only, T5 with train_t5xxl; their rate is --learning_rate if unset.

    One rate is for all, a list has one for each; a rate of 0 trains none.
    """
    if not is_off(source.get("network_train_unet_only")) or source.get("network_train_text_encoder_only"):
        return NOTHING
    denoiser = source.get("unet_lr") or source.get("learning_rate", 2e-6)
    given = source.get("text_encoder_lr")
    listed = given if isinstance(given, list) else str(given).split() if isinstance(given, str) else [given]
    listed = [source.get("learning_rate", 2e-6) if each is None else each for each in listed or [None]]
    names = ENCODERS.get(source.family, ())
    rates = {name: listed[min(i, len(listed) - 1)] for i, name in enumerate(names)}
    for name, single in zip(names, ENCODER_RATES[1:], strict=False):
        rates[name] = source.get(single, rates[name])
    if str(source.get("network_args.train_t5xxl", False)).lower() != "true":
        rates.pop("t5", None)
    return trained(rates, denoiser, "attention+mlp")


def masks(data: str) -> Any:
    """A folder of masks, which sd-scripts reads where the loss is masked."""

    def convert(value: Any, source: Source) -> Any:
        return NOTHING if is_off(value) else {f"{data}.masks": "files", f"{data}.mask_folder": value}

    return convert


def held_out(value: Any, source: Source) -> Any:
    """A folder that is only validated on; a share of one has no counterpart, a share of all images has."""
    if is_off(value):
        return NOTHING
    return True if value == 1 else Lost("validation.fraction is a share of all images")
