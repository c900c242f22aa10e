"""musubi-tuner's commands and their TOML; options that it has from sd-scripts have the rows of that table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.command_line import SCRIPT
from flame_train.config.foreign.read_rows import optimizer_rows, read_table
from flame_train.errors import ConfigError
from flame_train.families import named_by

from . import sd_scripts
from .clips import OF_MUSUBI
from .conversions import number, sampled, sampled_as_flux, swapped
from .kohya_files import flat, of_config_file, unpacked
from .table import NOTHING, Changed, Convert, Lost, Program, Reading, Setting, Source, Table, Tree, is_off, no_file

_SCRIPTS: Final = named_by("musubi-tuner")
_OTHERS: Final = ("wan_", "hv_", "fpack_", "kandinsky5_", "hidream_o1_", "ideogram4_")
_MODULES: Final = named_by("musubi-tuner modules")
_FOLDERS: Final = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
_EDITS: Final = {"edit-2509": "2509", "edit-2511": "2511"}
_VERSIONS: Final = ("dev", "klein-4b", "klein-9b", "klein-base-4b", "klein-base-9b", "original", *_EDITS)


def _is_mine(tree: Tree) -> bool:
    """Gives a command, a dataset TOML with folders of its names, or a file of arguments with its name of the model."""
    script = str(tree.get(SCRIPT, ""))
    if script in _SCRIPTS or script.startswith(_OTHERS):
        return True
    datasets = tree.get("datasets")
    tables = [one for one in datasets if isinstance(one, Mapping)] if isinstance(datasets, list) else []
    if any(name in one for one in tables for name in _FOLDERS):
        return True
    return "dit" in tree and ("network_module" in tree or "dataset_config" in tree)


def _read(reading: Reading) -> Source:
    if reading.script and reading.script not in _SCRIPTS:
        raise ConfigError(
            f"{reading.file}: expected a command of {', '.join(_SCRIPTS)}, got one of {reading.script}; "
            "its model is not trained here"
        )
    tree = {name: value for name, value in reading.tree.items() if name not in ("general", "datasets")}
    settings = flat(reading, tree)
    if reading.script and (named := settings.get("config_file")) is not None:
        settings = of_config_file(reading, named) | settings
    sets, notes = _sets(reading), list[str]()
    config = settings.pop("dataset_config", None)
    if config and config.value and not sets:
        other = reading.beside(str(config.value))
        sets = _sets(other) if other else []
        if other is None:
            notes.append(no_file("dataset_config", config, "its folders are"))
    version = settings.get("model_version")
    if version is not None and version.value not in _VERSIONS:
        raise ConfigError(f"{version.place}: model_version = {version.value}: this model is not trained here")
    module = settings.get("network_module")
    if module and str(module.value).startswith("networks.lora_") and module.value not in _MODULES:
        raise ConfigError(f"{module.place}: network_module = {module.value}: its model is not trained here")
    family = _SCRIPTS.get(reading.script) or (_MODULES.get(str(module.value), "") if module else "")
    return Source(family, unpacked(settings), sets, notes)


def _sets(reading: Reading) -> list[dict[str, Setting]]:
    general, datasets = reading.tree.get("general", {}), reading.tree.get("datasets", [])
    below = reading.flat(general, ("general",)) if isinstance(general, Mapping) else {}
    return [below | reading.flat(one, ("datasets", f"[{i}]")) for i, one in enumerate(datasets)]


def _kind(value: Any, source: Source) -> Any:
    """Its LoRA modules are one a family, and LoHa and LoKr are for all."""
    if value in _MODULES:
        return NOTHING
    kinds = {"networks.loha": "loha", "networks.lokr": "lokr"}
    return kinds.get(str(value), Lost(f"no such adapter here: {value}"))


def _alpha(value: Any, source: Source) -> Any:
    return float(number(value)) or float(number(source.get("network_dim") or 4))


def _text_encoder(value: Any, source: Source) -> Any:
    version = str(source.get("model_version") or "dev").removeprefix("flux.2-")  # musubi-tuner's default
    key = "mistral" if source.family == "flux2" and version == "dev" else "qwen3"
    return {f"text_encoders.{key}": str(value)}


def _rotated(value: Any, source: Source) -> Any:
    """Converts --convrot_int8, whose products are in int8: forward always, backward as --convrot_int8_bwd says."""
    if is_off(value):
        return NOTHING
    whole = source.get("convrot_int8_bwd") == "int8"
    return "int8-convrot" if whole else Changed("int8-convrot", 'products in int8 are model.arithmetic = "int8"')


def _targets(value: Any, source: Source) -> Any:
    """Converts the linear layers of the blocks without those that modulate; of Krea 2 all there are."""
    return source.fact("musubi_layers") or ["attention+mlp"]


def _levels(value: Any, source: Source) -> Any:
    """Converts --timestep_sampling. sigma counts from the noisiest, and --discrete_flow_shift is of samples there."""
    shift, std = number(source.get("discrete_flow_shift", 1.0)), float(number(source.get("sigmoid_scale", 1.0)))
    scheme = source.get("weighting_scheme", "none")
    if value == "logsnr" or (value == "sigma" and scheme == "logit_normal"):
        answer = _normal(source, -0.5 if value == "logsnr" else -1.0)
    elif value == source.fact("musubi_size_shift"):
        answer = sampled_as_flux("sigmoid", source, std)
    elif value == "sigma" and scheme == "mode":
        answer = sampled("mode", 1.0) | {"loss.mode_scale": float(number(source.get("mode_scale", 1.29)))}
    else:
        known = {
            **dict.fromkeys(("sigma", "uniform"), sampled("uniform", 1.0)),
            "sigmoid": sampled("sigmoid", 1.0, std),
            "shift": sampled("sigmoid", shift, std),
            source.fact("musubi_shift") or "": sampled("sigmoid", 0.0, std),
        }
        if value not in known:
            return Lost("no such distribution here; the family's own is used instead (loss.timestep_sampling)")
        answer = known[value]
    weight = {"loss.weighting": scheme} if scheme in ("sigma_sqrt", "cosmap") else {}
    return Changed(answer.value | weight, answer.remark) if isinstance(answer, Changed) else answer | weight


def _normal(source: Source, scale: float) -> Any:
    """Returns a level that is the sigmoid of `scale` times a normal number (trainer_base.py:617, timesteps.py:48)."""
    mean, std = (float(number(source.get(f"logit_{name}", usual))) for name, usual in (("mean", 0.0), ("std", 1.0)))
    keys = sampled("logit_normal", 1.0, abs(scale) * std)
    return keys | ({"loss.logit_mean": scale * mean} if mean else {})


def _span(last: bool) -> Convert:
    """Returns the first or the last level of a span; those of sigma are counted from the noisiest."""

    def convert(value: Any, source: Source) -> Any:
        level = int(number(value))
        if source.get("timestep_sampling", "sigma") != "sigma":
            return {"loss.max_timestep" if last else "loss.min_timestep": level}
        return {"loss.min_timestep" if last else "loss.max_timestep": 1000 - level}

    return convert


def _bucketed(value: Any, source: Source) -> Any:
    if not is_off(value):
        return NOTHING
    return Lost("images are cut to the resolution there, and keep their shape here; cut them beforehand")


_FROM_KOHYA: Final = MappingProxyType(
    {
        **{"network_dim": 548, "network_dropout": 560, "network_weights": 542, "dim_from_weights": 579},
        **{"scale_weight_norms": 584, "base_weights": 590, "base_weights_multiplier": 597, "optimizer_type": 303},
        **{"lr_scheduler": 327, "lr_warmup_steps": 333, "lr_decay_steps": 340, "lr_scheduler_num_cycles": 347},
        **{"lr_scheduler_power": 353, "lr_scheduler_timescale": 359, "lr_scheduler_min_lr_ratio": 366},
        **{"lr_scheduler_type": 372, "lr_scheduler_args.*": 374, "max_train_epochs": 166, "max_train_steps": 164},
        **{"gradient_accumulation_steps": 192, "max_grad_norm": 318, "seed": 182, "mixed_precision": 198},
        **{"learning_rate": 316, "sample_every_n_steps": 279, "sample_every_n_epochs": 288, "sample_prompts": 294},
        "sample_at_first": 285,
        **{"save_every_n_epochs": 618, "save_every_n_steps": 624, "save_precision": 205, "(checkpoints)": 630},
        **{"save_last_n_epochs": 630, "save_last_n_steps": 642, "save_state": 654, "save_state_on_train_end": 659},
        **{"save_last_n_epochs_state": 636, "save_last_n_steps_state": 648, "resume": 615, "output_dir": 607},
        **{"output_name": 610, "metadata_title": 669, "metadata_author": 675, "training_comment": 573},
        **{"log_with": 222, "log_tracker_name": 232, "logging_dir": 216, "log_prefix": 229, "log_config": 255},
        **{"log_tracker_config": 244, "no_metadata": 539, "sdpa": 52, "xformers": 67, "split_attn": 78},
        **{"max_data_loader_n_workers": 172, "persistent_data_loader_workers": 178, "dynamo_backend": 135},
        **{f"huggingface_{name}": 714 for name in ("repo_id", "repo_visibility", "repo_type", "token", "path_in_repo")},
        **{"async_upload": 747, "resume_from_huggingface": 742, "save_state_to_huggingface": 739, "config_file": 37},
    }
)
"""Options that musubi-tuner has from sd-scripts, of one name and meaning, with their lines."""

_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "(kontext)": lambda v, s: True if s.family == _SCRIPTS["flux_kontext_train_network.py"] else NOTHING,
        **OF_MUSUBI,
        "text_encoder": _text_encoder,
        "model_version": lambda v, s: _EDITS.get(str(v), NOTHING),
        "convrot_int8": _rotated,
        "network_module": _kind,
        "network_alpha": _alpha,
        "(layers)": _targets,
        "timestep_sampling": _levels,
        "min_timestep": _span(last=False),
        "max_timestep": _span(last=True),
        "blocks_to_swap": swapped("gradient_checkpointing"),
        "enable_bucket": _bucketed,
    }
)


@cache
def _table() -> Table:
    """Returns the rows of its own, those that it has from sd-scripts, and those of optimizers."""
    own = read_table("musubi_tuner", "musubi-tuner", _OWN)
    theirs = sd_scripts.PROGRAM.table().rows
    shared = [
        replace(row, at=str(_FROM_KOHYA[row.key])) for row in theirs if row.key in _FROM_KOHYA and not row.families
    ]
    return Table([*own.rows, *shared, *optimizer_rows("optimizer_args.")], own.set_rows)


PROGRAM: Final = Program(
    "musubi-tuner",
    _is_mine,
    _read,
    _table,
    "https://github.com/kohya-ss/musubi-tuner/blob/30c658c/src/musubi_tuner/training/parser_common.py",
)
