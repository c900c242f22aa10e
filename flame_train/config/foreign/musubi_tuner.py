"""musubi-tuner's commands and their TOML; options that it has from sd-scripts have the rows of that table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.command_line import SCRIPT
from flame_train.errors import ConfigError
from flame_train.families import named_by

from . import sd_scripts
from .conversions import (
    SAMPLED,
    ending,
    inverted,
    number,
    optimizer_keys,
    sampled,
    sampled_as_flux,
    side,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
)
from .sd_scripts_reading import flat, of_config_file, unpacked
from .table import (
    NOTHING,
    Changed,
    Convert,
    Lost,
    Program,
    Reading,
    Setting,
    Source,
    Tree,
    is_off,
    needless,
    never,
    no_file,
    part_of,
    turned,
)

_SCRIPTS: Final = named_by("musubi-tuner")
_OTHERS: Final = ("wan_", "hv_", "fpack_", "kandinsky5_", "hidream_o1_", "ideogram4_")
_MODULES: Final = named_by("musubi-tuner modules")
_FOLDERS: Final = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
_VERSIONS: Final = ("klein-4b", "klein-9b", "klein-base-4b", "klein-base-9b", "original")
_SHIFTS: Final = MappingProxyType({"flux": "flux_shift", "qwenimage1": "qwen_shift", "krea2": "krea2_shift"})
"""The shift that follows the size of an image, by the family that has it."""


def _is_mine(tree: Tree) -> bool:
    """A command, a dataset TOML with folders of its names, or a file of arguments with its name of the model."""
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
            "its family is not here"
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
    family = _SCRIPTS.get(reading.script) or (_MODULES.get(str(module.value), "") if module else "")
    return Source(family, unpacked(settings), sets, notes)


def _sets(reading: Reading) -> list[dict[str, Setting]]:
    """The datasets, each with what [general] says."""
    general, datasets = reading.tree.get("general", {}), reading.tree.get("datasets", [])
    below = reading.flat(general, ("general",)) if isinstance(general, Mapping) else {}
    return [below | reading.flat(one, ("datasets", f"[{i}]")) for i, one in enumerate(datasets)]


def _kind(value: Any, source: Source) -> Any:
    """Its LoRA modules are one a family, and LoHa and LoKr are for all."""
    if value in _MODULES:
        return NOTHING
    found = {"networks.loha": "loha", "networks.lokr": "lokr"}
    return found.get(str(value), Lost(f"no such adapter here: {value}"))


def _alpha(value: Any, source: Source) -> Any:
    return float(number(value)) or float(number(source.get("network_dim") or 4))


def _targets(value: Any, source: Source) -> Any:
    """The linear layers of the blocks without those that modulate; of Krea 2 all there are."""
    return ["full"] if source.family == "krea2" else ["attention+mlp"]


def _levels(value: Any, source: Source) -> Any:
    """--timestep_sampling, and the weight of a level, which --weighting_scheme has with any.

    sigma counts its levels from the noisiest, and its table has no shift: --discrete_flow_shift is of samples there.
    """
    shift, std = number(source.get("discrete_flow_shift", 1.0)), float(number(source.get("sigmoid_scale", 1.0)))
    scheme = source.get("weighting_scheme", "none")
    if value == "logsnr" or (value == "sigma" and scheme == "logit_normal"):
        found = _normal(source, -0.5 if value == "logsnr" else -1.0)
    elif value == "flux2_shift" and source.family == "flux2":
        found = sampled_as_flux("sigmoid", source, std)
    elif value == "sigma" and scheme == "mode":
        found = sampled("mode", 1.0) | {"loss.mode_scale": float(number(source.get("mode_scale", 1.29)))}
    else:
        known = {
            **dict.fromkeys(("sigma", "uniform"), sampled("uniform", 1.0)),
            "sigmoid": sampled("sigmoid", 1.0, std),
            "shift": sampled("sigmoid", shift, std),
            _SHIFTS.get(source.family, ""): sampled("sigmoid", 0.0, std),
        }
        if value not in known:
            return Lost("no such distribution here; the family's own is used instead (loss.timestep_sampling)")
        found = known[value]
    weight = {"loss.weighting": scheme} if scheme in ("sigma_sqrt", "cosmap") else {}
    return Changed(found.value | weight, found.remark) if isinstance(found, Changed) else found | weight


def _normal(source: Source, scale: float) -> Any:
    """A level that is the sigmoid of `scale` times a normal number (trainer_base.py:617, timesteps.py:48)."""
    mean, std = (float(number(source.get(f"logit_{name}", usual))) for name, usual in (("mean", 0.0), ("std", 1.0)))
    found = sampled("logit_normal", 1.0, abs(scale) * std)
    return found | ({"loss.logit_mean": scale * mean} if mean else {})


def _span(last: bool) -> Convert:
    """The first or the last level of a span; those of sigma are counted from the noisiest."""

    def convert(value: Any, source: Source) -> Any:
        level = int(number(value))
        if source.get("timestep_sampling", "sigma") != "sigma":
            return {"loss.max_timestep" if last else "loss.min_timestep": level}
        return {"loss.min_timestep" if last else "loss.max_timestep": 1000 - level}

    return convert


def _fp8_text(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else "fp8"


def _vae_dtype(value: Any, source: Source) -> Any:
    found = {"float32": NOTHING, "fp32": NOTHING, "bfloat16": "bf16", "bf16": "bf16"}
    return found.get(value, Lost("model.vae_precision has fp32, tf32 and bf16"))


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
        **{"save_every_n_epochs": 618, "save_every_n_steps": 624, "save_precision": 205, "(checkpoints)": 630},
        **{"save_last_n_epochs": 630, "save_last_n_steps": 642, "save_state": 654, "save_state_on_train_end": 659},
        **{"save_last_n_epochs_state": 636, "save_last_n_steps_state": 648, "resume": 615, "output_dir": 607},
        **{"output_name": 610, "metadata_title": 669, "metadata_author": 675, "training_comment": 573},
        **{"log_with": 222, "log_tracker_name": 232, "logging_dir": 216, "log_prefix": 229, "log_config": 255},
        **{"log_tracker_config": 244, "no_metadata": 539, "sdpa": 52, "xformers": 67, "split_attn": 78},
        **{"max_data_loader_n_workers": 172, "persistent_data_loader_workers": 178, "dynamo_backend": 135},
        **{"async_upload": 747, "resume_from_huggingface": 742, "save_state_to_huggingface": 739, "config_file": 37},
    }
)
"""Options that musubi-tuner has from sd-scripts, of one name and meaning, with their lines."""

_SPEED: Final = "it changes how fast a run is, where it computes and what it shows"

_ROWS: Final = [
    turned("dit@754", "model.checkpoint", unless_off),
    turned("vae@755", "model.vae", unless_off),
    turned("vae_dtype@756", "model.vae_precision", _vae_dtype),
    turned("text_encoder@../zimage_train_network.py:340", "text_encoders.qwen3", unless_off),
    turned("text_encoder1@../flux_kontext_train_network.py:380", "text_encoders.t5", unless_off),
    turned("text_encoder2@../flux_kontext_train_network.py:383", "text_encoders.clip_l", unless_off),
    *(
        turned(name, "text_encoders.precision", _fp8_text)
        for name in (
            "fp8_text_encoder@../flux_2_train_network.py:344",
            "fp8_llm@../zimage_train_network.py:341",
            "fp8_vl@../qwen_image_train_network.py:594",
            "fp8_t5@../flux_kontext_train_network.py:381",
        )
    ),
    *(
        turned(name, "model.quantize", switched("fp8"))
        for name in ("fp8_base@383", "fp8_scaled@../zimage_train_network.py:339")
    ),
    turned("(kontext)", "model.kontext", lambda v, s: True if s.family == "flux" else NOTHING, absent="by its command"),
    *needless("the checkpoint says which model it is of", "model_version@../flux_2/flux2_utils.py:118"),
    turned("network_module@545", "lora.kind", _kind),
    turned("network_alpha@554", "lora.alpha", _alpha, absent=1),
    turned("(layers)", "lora.targets", _targets, absent="all"),
    turned("network_args.loraplus_lr_ratio@../networks/lora.py:477", "optimizer.lora_plus_ratio", unless_off),
    *(
        turned(f"network_args.{name}@../networks/{at}", f"lora.{name}", unless_off)
        for name, at in (("rank_dropout", "lora.py:433"), ("module_dropout", "lora.py:436"), ("factor", "lokr.py:280"))
    ),
    never("network_args.*@566", "lora.targets takes globs, and [[lora.rules]] those of single layers"),
    turned("timestep_sampling@437", (*SAMPLED, "loss.mode_scale", "loss.weighting"), _levels, absent="sigma"),
    *part_of(
        "discrete_flow_shift@457 sigmoid_scale@463 weighting_scheme@469 logit_mean@476 logit_std@482 mode_scale@488"
    ),
    turned("min_timestep@494", ("loss.min_timestep", "loss.max_timestep"), _span(last=False)),
    turned("max_timestep@500", ("loss.min_timestep", "loss.max_timestep"), _span(last=True)),
    never("preserve_distribution_shape@506", "levels are scaled into min_timestep and max_timestep"),
    never("num_timestep_buckets@515", "levels of a batch are drawn each by itself"),
    turned("guidance_scale@434", "loss.guidance_scale", to_float, families=["flux"]),
    *needless("Flux alone is given a guidance", "guidance_scale@434"),
    turned("gradient_checkpointing_cpu_offload@187", "gradient.checkpointing", switched("offload")),
    turned("gradient_checkpointing@184", "gradient.checkpointing", switched("full")),
    swapped("blocks_to_swap@392", "gradient_checkpointing"),
    *(
        never(f"{name}", why)
        for name, why in (
            ("lr_scheduler_args@374", "no class path stands in a config; schedule.name has the schedules"),
            ("huggingface_*@714", "uploads to the hub are not here"),
            ("metadata_*@681", "output.title, author and trigger are what metadata take of a config"),
            ("num_layers@../qwen_image_train_network.py:595", "all of a model's layers are there"),
            ("remove_first_image_from_target@../qwen_image_train_network.py:597", "layered images are not here"),
            ("turbo_dit@../krea2_train_network.py:494", "images are drawn with the model that is trained"),
        )
    ),
    *needless(
        _SPEED,
        "flash_attn@57 sage_attn@62 flash3@72 compile@87 compile_backend@92 compile_mode@98 compile_dynamic@105 "
        "compile_fullgraph@113 compile_cache_size_limit@118 cuda_allow_tf32@124 cuda_cudnn_benchmark@129 "
        "dynamo_mode@143 dynamo_fullgraph@151 dynamo_dynamic@157 ddp_timeout@260 ddp_gradient_as_bucket_view@266 "
        "ddp_static_graph@271 wandb_run_name@238 wandb_api_key@250 use_pinned_memory_for_block_swap@398 "
        "block_swap_h2d_only@404 block_swap_ring_size@411 img_in_txt_in_offloading@419 disable_numpy_memmap@424 "
        "show_timesteps@529 sample_at_first@285 dit_dtype@../zimage_train_network.py:338 "
        "use_32bit_attention@../zimage_train_network.py:343 turbo_dit_cache@../krea2_train_network.py:504",
    ),
    *(
        replace(row, at=str(_FROM_KOHYA[row.key]))
        for row in sd_scripts.PROGRAM.rows
        if row.key in _FROM_KOHYA and not row.families
    ),
    *optimizer_keys("optimizer_args."),
]

_SET_ROWS: Final = [
    turned("image_directory@../dataset/config_utils.py:47", "set.path", unless_off),
    *(
        never(name, "captions stand in text files or metadata.jsonl, and videos are not here")
        for name in ("image_jsonl_file@../dataset/config_utils.py:48", "video_*@../dataset/config_utils.py:64")
    ),
    turned("control_directory@../dataset/config_utils.py:49", "set.control", unless_off),
    turned("resolution@../dataset/config_utils.py:34", "set.resolution", side, absent=[960, 544]),
    turned("batch_size@../dataset/config_utils.py:38", "set.batch_size", to_number),
    turned("num_repeats@../dataset/config_utils.py:39", "set.repeats", to_number),
    turned("caption_extension@../dataset/config_utils.py:37", "set.caption_extension", ending),
    turned("enable_bucket@../dataset/config_utils.py:35", (), _bucketed, absent=False),
    turned("bucket_no_upscale@../dataset/config_utils.py:36", "set.upscale", inverted, absent=False),
    *needless("caches are told from others by what they are made of", "cache_directory@../dataset/config_utils.py:40"),
    *needless("it shows what is read", "debug_dataset@../dataset/config_utils.py:41"),
    *(
        never(f"{name}@../dataset/config_utils.py:{line}", "control images have the size that their model wants")
        for name, line in (("no_resize_control", 58), ("control_resolution", 59))
    ),
    *(
        never(f"{name}@../dataset/config_utils.py:{line}", "it is of videos and their models")
        for name, line in (("multiple_target", 50), ("fp_*", 53), ("target_frames", 67), ("frame_*", 68))
    ),
    *needless(
        "videos alone have it", "max_frames@../dataset/config_utils.py:71 source_fps@../dataset/config_utils.py:72"
    ),
]

PROGRAM: Final = Program(
    "musubi-tuner",
    _is_mine,
    _read,
    _ROWS,
    _SET_ROWS,
    "https://github.com/kohya-ss/musubi-tuner/blob/30c658c/src/musubi_tuner/training/parser_common.py",
)
