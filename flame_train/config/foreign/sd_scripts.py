"""sd-scripts: its TOML, flat or in sections, its dataset TOML, and a saved command line.

Places are in kohya-ss/sd-scripts: scripts at its top, else in `library/` and `networks/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.command_line import SCRIPT
from flame_train.config.foreign.read_rows import read_table
from flame_train.data.image_formats import IMAGE_ENDINGS
from flame_train.errors import ConfigError
from flame_train.families import named_by

from . import sample_prompts
from . import sd_scripts_networks as networks
from . import sd_scripts_values as own
from .conversions import number, number_format, one_of, swapped, to_float, to_number, unless_off, where
from .table import NOTHING, Changed, Convert, Lost, Program, Reading, Setting, Source, Tree, is_off, keep, no_file

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
_OF_SETS: Final = (
    *("resolution", "enable_bucket", "bucket_no_upscale", "bucket_reso_steps", "min_bucket_reso", "max_bucket_reso"),
    *("caption_extension", "caption_dropout_rate", "shuffle_caption", "keep_tokens", "keep_tokens_separator"),
    *("caption_separator", "caption_tag_dropout_rate", "caption_prefix", "caption_suffix", "enable_wildcard"),
    *("flip_aug", "random_crop", "alpha_mask"),
)
_LISTS: Final = ("network_args", "optimizer_args", "lr_scheduler_args")


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
    settings = flat(reading, own)
    named = settings.get("config_file")
    if reading.script and named is not None:
        settings = of_config_file(reading, named) | settings
    notes: list[str] = []
    sets = _sets(reading) or datasets_of(reading, settings, notes)
    settings.pop("dataset_config", None)
    return source_of(_family(reading, settings), settings, sets, notes, reading.folder)


def datasets_of(reading: Reading, settings: dict[str, Setting], notes: list[str]) -> list[dict[str, Setting]]:
    """Returns the tables of the dataset TOML that --dataset_config names; a note where it is missing."""
    named = settings.pop("dataset_config", None)
    if named is None or not named.value:
        return []
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("dataset_config", named, "its folders are"))
        return []
    return _sets(other)


def source_of(
    family: str,
    settings: dict[str, Setting],
    sets: list[dict[str, Setting]],
    notes: list[str],
    folder: Path | None,
) -> Source:
    """Returns the arguments of a command, and the tables of its dataset TOML or none, as the rows read them.

    Args:
        family: the model family, or "".
        settings: the arguments.
        sets: the tables.
        notes: files that are named and not there.
        folder: where relative folders of images are looked for, beside the working directory.
    """
    if not sets and settings.get("train_data_dir", Setting("", "")).value:
        sets = counted(_folders(settings), folder)
    if any("is_reg" in one for one in sets) and "prior_loss_weight" in settings:
        weight = settings.pop("prior_loss_weight")
        sets = [one | {"prior_loss_weight": weight} if "is_reg" in one else one for one in sets]
    filled = _filled_in(sets, settings)
    return Source(family, unpacked(settings), filled, notes)


def flat(reading: Reading, tree: Mapping[str, Any]) -> dict[str, Setting]:
    """Returns the settings without their sections, as sd-scripts takes them (train_util.py:4748)."""
    return {name.rpartition(".")[2]: setting for name, setting in reading.flat(tree).items()}


def of_config_file(reading: Reading, named: Setting) -> dict[str, Setting]:
    """Returns the TOML that a command names by --config_file, whose arguments override it (train_util.py:4700)."""
    name = str(named.value)
    name = name if name.endswith(".toml") else f"{name}.toml"
    other = reading.beside(name)
    if other is None:
        raise ConfigError(
            f"{named.place}: config_file = {name!r}: expected the file beside this one, got none; it says how to train"
        )
    return flat(other, {key: value for key, value in other.tree.items() if key not in ("general", "datasets")})


def _filled_in(sets: list[dict[str, Setting]], settings: dict[str, Setting]) -> list[dict[str, Setting]]:
    """Gives the sets, with what the config says of all images where they say nothing; it is taken out of `settings`."""
    if not sets:
        return []
    names = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"} | {name: name for name in _OF_SETS}
    shared = {ours: settings.pop(theirs) for theirs, ours in names.items() if theirs in settings}
    return [shared | one for one in sets]


def _sets(reading: Reading) -> list[dict[str, Setting]]:
    """Returns the subsets of a dataset TOML, each with what [general] and its dataset say."""
    sets: list[dict[str, Setting]] = []
    datasets = reading.tree.get("datasets")
    general = reading.tree.get("general", {})
    below = reading.flat(general, ("general",)) if isinstance(general, Mapping) else {}
    for i, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        at = ("datasets", f"[{i}]")
        own = reading.flat({name: value for name, value in dataset.items() if name != "subsets"}, at)
        sets += counted(
            [
                below | own | reading.flat(subset, (*at, "subsets", f"[{j}]"))
                for j, subset in enumerate(dataset.get("subsets", []))
            ],
            reading.folder,
        )
    return sets


def _folders(settings: dict[str, Setting]) -> list[dict[str, Setting]]:
    """Returns the folders that train_data_dir and reg_data_dir name; with in_json one without repeats."""
    images = {"image_dir": settings.pop("train_data_dir")}
    if settings.get("in_json", Setting("", "")).value:
        return [images]
    folders = [images | {"N_name": Setting(True, images["image_dir"].place, "folders named N_name")}]
    regularization = settings.pop("reg_data_dir", None)
    if regularization and regularization.value:
        usual = {"prior_loss_weight": Setting(1.0, "")}
        marked = {
            "image_dir": regularization,
            "N_name": Setting(True, ""),
            "is_reg": Setting(True, regularization.place),
        }
        folders.append(marked | usual)
    return folders


def unpacked(settings: dict[str, Setting]) -> dict[str, Setting]:
    """network_args = ["conv_dim=8"] as network_args.conv_dim, and so on; text that spells a number as one."""
    arguments = {}
    for name, setting in settings.items():
        if name in _LISTS:
            parts = setting.value if isinstance(setting.value, list) else str(setting.value).split()
            for part in map(str, parts):
                key, _, value = part.replace('"', "").partition("=")
                arguments[f"{name}.{key.strip()}"] = Setting(_literal(value), setting.place)
        else:
            arguments[name] = setting
    return arguments


def _literal(text: str) -> Any:
    """Returns what the value of `key=value` spells: a number, true, false or text."""
    plain = text.strip(" \"'")
    return {"true": True, "false": False}.get(plain.lower(), number(plain))


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
        raise ConfigError(f"{reading.file}: expected SDXL, SD3, Flux or Anima, got a command of {reading.script}")
    if "cond_emb_dim" in names:
        raise ConfigError(f"{settings['cond_emb_dim'].place}: expected a LoRA, got a ControlNet-LLLite (cond_emb_dim)")
    if "sdxl" in settings and settings.pop("sdxl").value:  # the web interface's box
        return "sdxl"
    for script, marks in _MARKS.items():
        if names & set(marks):
            return _SCRIPTS[script]
    if settings.get("v2") and settings["v2"].value:
        raise ConfigError(f"{settings['v2'].place}: expected SDXL, SD3 or Flux, got Stable Diffusion 2 (v2)")
    return ""


WEIGHT: Final = "(regularization)"
"""The name of the setting that holds the counts of one dataset: images of training, and of regularization."""

_UNCOUNTED: Final = (
    "sd-scripts shows as many of these images as training images in an epoch, and its folders are not here to count; "
    "set the set's weight to training images / regularization images, each times its repeats"
)


def counted(sets: Sequence[dict[str, Setting]], folder: Path | None) -> list[dict[str, Setting]]:
    """The sets of one dataset, those of regularization with the counts, or None where a folder cannot be counted."""
    regular = [bool("is_reg" in one and one["is_reg"].value) for one in sets]
    if not any(regular):
        return list(sets)
    counts = [_count(one, folder) for one in sets]
    kinds = [sum(count for count, is_reg in zip(counts, regular, strict=True) if is_reg == kind) for kind in (0, 1)]
    value = tuple(kinds) if all(counts) and all(kinds) else None
    return [
        one | ({WEIGHT: Setting(value, one["is_reg"].place, one["image_dir"].written or _said(one))} if is_reg else {})
        for one, is_reg in zip(sets, regular, strict=True)
    ]


def weight(value: Any, source: Source) -> Any:
    """Converts how often the set's images come beside their repeats."""
    if value is None:
        return Lost(_UNCOUNTED)
    images, regular = value
    factor = round(images / regular, 6)
    if factor == 1:
        return NOTHING
    return Changed(factor, f"{regular} images come as often as {images} of training, as sd-scripts repeats them")


def _said(one: Mapping[str, Setting]) -> str:
    return f"regularization images in {one['image_dir'].value}" if "image_dir" in one else "regularization images"


def _count(one: Mapping[str, Setting], folder: Path | None) -> int:
    """Returns the images of a set, times their repeats; 0 where its folder is not there or has none."""
    named = str(one["image_dir"].value) if "image_dir" in one else ""
    places = [base / Path(named).expanduser() for base in (folder, Path()) if base is not None and named]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        return 0
    if "N_name" in one:
        repeats = ((own, own.name.partition("_")[0]) for own in place.iterdir() if own.is_dir())
        return sum(int(times) * _images(own) for own, times in repeats if times.isdecimal())
    return int(number(one["num_repeats"].value) if "num_repeats" in one else 1) * _images(place)


def _images(folder: Path) -> int:
    return sum(file.suffix.lower() in IMAGE_ENDINGS for file in folder.iterdir())


_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "blocks_to_swap": swapped("gradient_checkpointing"),
        "unused": own.unused,
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
        "unet_lr": own.rate,
        "learning_rate": own.usual_rate,
        "optimizer_type": own.optimizer,
        "optimizer_args.decouple": own.decoupled,
        "lr_scheduler": own.schedule,
        "lr_warmup_steps": own.rise,
        "lr_scheduler_num_cycles": where("lr_scheduler", ("cosine_with_restarts",), to_number),
        "lr_scheduler_power": where("lr_scheduler", ("polynomial",), to_float),
        "lr_scheduler_timescale": where("lr_scheduler", ("inverse_sqrt",), unless_off),
        "lr_scheduler_min_lr_ratio": own.least_rate,
        "lr_decay_steps": own.decay,
        "max_train_steps": own.steps,
        "gradient_checkpointing": lambda v, s: (
            NOTHING if is_off(v) else "offload" if s.get("cpu_offload_checkpointing") else "full"
        ),
        "bf16_master": own.bf16_master,
        "loss_type": own.loss,
        "huber_schedule": where("loss_type", own.HUBERS, keep),
        "huber_c": where("loss_type", own.HUBERS, to_float),
        "huber_scale": where("loss_type", own.HUBERS, to_float),
        "timestep_sampling": own.noise_levels,
        "weighting_scheme": own.noise_levels_sd3,
        "of_flow_alone": lambda v, s: Lost("flow models alone have it in sd-scripts"),
        "model_prediction_type": own.raw,
        "unused_span": own.unused_span,
        "noise_offset_random_strength": own.with_("noise_offset"),
        "adaptive_noise_scale": own.with_("noise_offset"),
        "multires_noise_discount": own.discount,
        "ip_noise_gamma_random_strength": own.with_("ip_noise_gamma"),
        "save_n_epoch_ratio": own.saved,
        "(checkpoints)": own.kept,
        "sample_prompts": sample_prompts.of_sd_scripts,
        "(samples)": own.unsampled,
        "sample_at_first": sample_prompts.at_first("sample_prompts"),
        "output_dir": lambda v, s: f"{v}/{s.get('output_name')}" if s.get("output_name") else v,
        "save_model_as": one_of({"safetensors": "kohya", None: "kohya"}, "files are always safetensors here"),
        "save_precision": lambda v, s: "fp32" if v is None else number_format(v, s),
        "log_with": own.tracked,
        "wandb_*": own.of_wandb,
        "enable_bucket": own.bucketed,
        "min_bucket_reso": own.bucket_bound(256),
        "max_bucket_reso": own.bucket_bound(1024),
        "dropout": own.dropout,
        "prior_loss_weight": lambda v, s: (
            NOTHING if number(v) == 1 else Lost("there are no regularization images that it could weigh")
        ),
        "conditioning_data_dir": own.masks("data"),
        "(regularization)": weight,
        "validation_split": own.held_out,
        "N_name": own.named_folders,
    }
)

_OWN_OF_SETS: Final = MappingProxyType({"conditioning_data_dir": own.masks("set")})

PROGRAM: Final = Program(
    "sd-scripts",
    is_mine,
    read,
    cache(partial(read_table, "sd_scripts", "sd-scripts", _OWN, _OWN_OF_SETS)),
    "kohya-ss/sd-scripts@48d368f",
)
