"""sd-scripts: its TOML, flat or in sections, its dataset TOML, and a saved command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from flame_train.errors import ConfigError

from .conversions import (
    MIN_SNR,
    SAMPLED,
    WARMUP,
    checkpoint,
    ending,
    inverted,
    min_snr,
    number,
    number_format,
    one_of,
    optimizer,
    optimizer_keys,
    sampled,
    schedule,
    side,
    switched,
    to_float,
    to_number,
    unless_off,
    warmup,
    weighting,
    where,
)
from .table import (
    NOTHING,
    Changed,
    Lost,
    Program,
    Reading,
    Row,
    Setting,
    Source,
    Tree,
    always,
    is_off,
    keep,
    needless,
    never,
    no_file,
    same,
    turned,
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
_LISTS: Final = ("network_args", "optimizer_args", "lr_scheduler_args")
_HUBERS: Final = ("huber", "smooth_l1")
_TEXT: Final = "text encoders are not trained here"
_EPOCHS_KEPT: Final = "`checkpoint.keep` counts checkpoints"


def _is_mine(tree: Tree) -> bool:
    """A dataset TOML, sections of the guides' names, or several of its own keys where no section of ours is."""
    datasets = tree.get("datasets")
    if isinstance(datasets, list) and any(isinstance(one, dict) and "subsets" in one for one in datasets):
        return True
    if any(name.endswith("_arguments") and isinstance(tree[name], Mapping) for name in tree):
        return True
    return sum(name in tree for name in _OWN_NAMES) >= 2


def _read(reading: Reading) -> Source:
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
    if not sets and "train_data_dir" in settings:
        sets = _folders(settings)
    return Source(_family(reading, settings), _unpacked(settings), sets, notes)


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
        found.append({"image_dir": regularization, "is_reg": Setting(True, regularization.place)})
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
    if names & {"ae", *_FLUX}:
        return "flux"
    if names & {"clip_g", "training_shift", "t5xxl"}:
        return "sd3"
    if reading.script == "train_network.py" or (settings.get("v2") and settings["v2"].value):
        raise ConfigError(f"{reading.file}: expected SDXL, SD3 or Flux, got Stable Diffusion 1 or 2 (train_network.py)")
    return ""


def _kind(value: Any, source: Source) -> Any:
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


def _targets(value: Any, source: Source) -> Any:
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


def _loss(value: Any, source: Source) -> Any:
    kind = {"l2": "mse"}.get(str(value), str(value))
    if kind in _HUBERS and source.get("huber_schedule") is None:
        return {"loss.kind": kind, "loss.huber_schedule": "snr"}
    return kind if kind == "mse" else {"loss.kind": kind}


def _noise_levels_flux(value: Any, source: Source) -> Any:
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


def _noise_levels_sd3(value: Any, source: Source) -> Any:
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


def _raw(value: Any, source: Source) -> Any:
    if value == "raw":
        return NOTHING
    return Lost(
        f"always raw here, and not {value}, which every guide advises against; a learning rate found with it may not fit"
    )


def _kept(value: Any, source: Source) -> Any:
    """A span of steps or epochs as a number of checkpoints."""
    every = source.get("save_every_n_steps") or source.get("save_every_n_epochs")
    if is_off(value) or is_off(every):
        return NOTHING
    return Changed(max(1, math.ceil(number(value) / number(every))), f"checkpoints, one every {every}")


def _steps(value: Any, source: Source) -> Any:
    return number(value) if is_off(source.get("max_train_epochs")) else NOTHING


def _prompts(value: Any, source: Source) -> Any:
    return Lost("a file of prompts: write its lines into sample.prompts")


def _schedule_ratio(value: Any, source: Source) -> Any:
    peak = number(source.get("unet_lr") or source.get("learning_rate") or 0)
    return (
        NOTHING
        if is_off(number(value)) or not peak
        else Changed(float(number(value)) * peak, "a rate here, and no ratio")
    )


def _bf16_master(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else Lost("adapters are always fp32 here")


def _encoder_rate(value: Any, source: Source) -> Any:
    return (
        NOTHING
        if all(is_off(number(each)) for each in (value if isinstance(value, list) else [value]))
        else Lost(_TEXT)
    )


_ROWS: Final = [
    turned("pretrained_model_name_or_path", "model.checkpoint", checkpoint),
    turned("vae", "model.vae", unless_off),
    turned("ae", "model.vae", unless_off),
    *(
        turned(name, f"text_encoders.{ours}", unless_off)
        for name, ours in (("clip_l", "clip_l"), ("clip_g", "clip_g"), ("t5xxl", "t5"))
    ),
    turned("v_parameterization", "model.prediction", switched("v")),
    *(turned(name, "model.prediction", switched("flow")) for name in ("flow_model", "flow_matching")),
    *(turned(name, "model.quantize", switched("fp8")) for name in ("fp8_base", "fp8_base_unet")),
    turned("mixed_precision", "train.precision", number_format, absent="no"),
    turned(
        "network_module", "lora.kind", _kind, say="lora.kind says which kind of adapter; remove it for a plain LoRA"
    ),
    turned("network_dim", "lora.rank", to_number, absent=4),
    turned("network_alpha", "lora.alpha", to_float, absent=1.0),
    turned("(layers)", "lora.targets", _targets, absent="all"),
    turned("network_args.conv_dim", "lora.conv_rank", unless_off),
    turned("network_args.conv_alpha", "lora.conv_alpha", to_float),
    *(
        turned(f"network_args.{name}", f"lora.{name}", unless_off)
        for name in ("rank_dropout", "module_dropout", "factor")
    ),
    *(
        turned(f"network_args.{name}", f"lora.{name}", switched(True))
        for name in ("decompose_both", "full_matrix", "wd_on_output")
    ),
    turned("network_args.dropout", "lora.dropout", unless_off),
    turned("network_args.rs_lora", "lora.scale", switched("sqrt_rank")),
    *(
        turned(f"network_args.{name}", "optimizer.lora_plus_ratio", unless_off)
        for name in ("loraplus_unet_lr_ratio", "loraplus_lr_ratio")
    ),
    *needless(
        "read with network_module", "network_args.algo network_args.preset network_args.dora_wd network_args.verbose"
    ),
    never("network_args.loraplus_text_encoder_lr_ratio", _TEXT),
    never("network_args.*", "ranks and rates of single layers are [[lora.rules]]; write them by hand"),
    turned("network_dropout", "lora.dropout", unless_off),
    turned("scale_weight_norms", "lora.max_norm", unless_off),
    turned("network_weights", "lora.from", unless_off),
    turned("dim_from_weights", "lora.from_resize", switched(True)),
    always("network_train_unet_only", "text encoders are never trained"),
    never("network_train_text_encoder_only", _TEXT),
    *(
        Row(name, (), _encoder_rate, say=f"not here: {_TEXT}")
        for name in ("text_encoder_lr", "text_encoder_lr1", "text_encoder_lr2", "text_encoder_lr3")
    ),
    turned("unet_lr", "optimizer.lr", to_float),
    turned("learning_rate", "optimizer.lr", to_float, absent=2e-6),
    turned("optimizer_type", "optimizer.name", optimizer),
    turned("use_8bit_adam", "optimizer.name", switched("adamw8bit"), say='write optimizer.name = "adamw8bit"'),
    turned("use_lion_optimizer", "optimizer.name", switched("lion"), say='write optimizer.name = "lion"'),
    turned("lr_scheduler", "schedule.name", schedule, absent="constant"),
    turned("lr_warmup_steps", WARMUP, warmup),
    turned("lr_scheduler_num_cycles", "schedule.cycles", where("lr_scheduler", ("cosine_with_restarts",), to_number)),
    turned("lr_scheduler_power", "schedule.power", where("lr_scheduler", ("polynomial",), to_float)),
    turned("lr_scheduler_timescale", "schedule.timescale", unless_off),
    turned(
        "lr_scheduler_min_lr_ratio",
        "schedule.min_lr",
        _schedule_ratio,
        say="schedule.min_lr is a rate, and no ratio: multiply by optimizer.lr",
    ),
    never("lr_decay_steps", "schedule.decay is a share of the run, and no number of steps: divide by train.steps"),
    never("lr_scheduler_type", "no class path stands in a config; schedule.name has the schedules"),
    never("lr_scheduler_args.*", "no class path stands in a config; schedule.name has the schedules"),
    turned(
        "max_train_epochs", "train.epochs", unless_off, say="train.epochs counts epochs, train.steps optimizer steps"
    ),
    turned("max_train_steps", "train.steps", _steps, absent=1600),
    turned("save_every_n_steps", "checkpoint.every", unless_off),
    turned(
        "save_every_n_epochs",
        "checkpoint.every_epochs",
        unless_off,
        say="checkpoint.every_epochs counts epochs, checkpoint.every steps",
    ),
    *(
        turned(
            name,
            "checkpoint.keep",
            _kept,
            say=f"a span of {name.rpartition('_')[2]} there; {_EPOCHS_KEPT}: divide by the interval",
        )
        for name in ("save_last_n_steps", "save_last_n_epochs")
    ),
    never("save_n_epoch_ratio", "an interval stands in checkpoint.every or checkpoint.every_epochs"),
    turned("sample_every_n_steps", "sample.every", unless_off),
    turned(
        "sample_every_n_epochs",
        "sample.every_epochs",
        unless_off,
        say="sample.every_epochs counts epochs, sample.every steps",
    ),
    Row("sample_prompts", (), _prompts),
    turned(
        "sample_sampler",
        "sample.sampler",
        one_of({"euler": "euler", "ddim": "ddim", "k_euler": "euler"}, "sample.sampler has euler and ddim"),
    ),
    never("sample_at_first", "grids come after steps, none before the first"),
    turned("gradient_accumulation_steps", "gradient.accumulation", to_number),
    turned(
        "gradient_checkpointing",
        "gradient.checkpointing",
        lambda v, s: NOTHING if is_off(v) else ("offload" if s.get("cpu_offload_checkpointing") else "full"),
    ),
    *needless("read with gradient_checkpointing", "cpu_offload_checkpointing"),
    turned("max_grad_norm", "gradient.clip_norm", to_float),
    turned("min_snr_gamma", MIN_SNR, min_snr),
    turned(
        "debiased_estimation_loss", "loss.weighting", weighting("debiased"), say='write loss.weighting = "debiased"'
    ),
    never("scale_v_pred_loss_like_noise_pred", "loss.weighting has min-SNR and soft min-SNR for v"),
    never("v_pred_like_loss", "loss.weighting has min-SNR and soft min-SNR for v"),
    turned("loss_type", ("loss.kind", "loss.huber_schedule"), _loss),
    turned("huber_schedule", "loss.huber_schedule", where("loss_type", _HUBERS, keep)),
    turned("huber_c", "loss.huber_c", where("loss_type", _HUBERS, to_float)),
    turned("huber_scale", "loss.huber_scale", where("loss_type", _HUBERS, to_float)),
    turned(
        "timestep_sampling",
        (*SAMPLED, "loss.weighting", "loss.mode_scale"),
        _noise_levels_flux,
        absent="sigma",
        families=["flux"],
    ),
    turned(
        "weighting_scheme",
        (*SAMPLED, "loss.weighting", "loss.mode_scale"),
        _noise_levels_sd3,
        absent="uniform",
        families=["sd3"],
    ),
    *needless(
        "read with timestep_sampling or weighting_scheme",
        "weighting_scheme training_shift logit_mean logit_std mode_scale discrete_flow_shift sigmoid_scale",
    ),
    Row("timestep_sampling", (), lambda v, s: Lost("flow models alone have it in sd-scripts")),
    Row("model_prediction_type", (), _raw, "sigma_scaled", ("flux",), say="always raw; remove it"),
    turned("guidance_scale", "loss.guidance_scale", to_float, absent=3.5, families=["flux"]),
    turned("min_timestep", "loss.min_timestep", unless_off, say="loss.min_timestep is the same, in thousandths"),
    turned("max_timestep", "loss.max_timestep", unless_off, say="loss.max_timestep is the same, in thousandths"),
    turned("zero_terminal_snr", "loss.zero_terminal_snr", switched(True)),
    turned("noise_offset", "loss.offset_noise", unless_off),
    turned("noise_offset_random_strength", "loss.offset_noise_random", switched(True)),
    turned("adaptive_noise_scale", "loss.offset_noise_adaptive", unless_off),
    turned("multires_noise_iterations", "loss.pyramid_noise", unless_off),
    turned(
        "multires_noise_discount",
        "loss.pyramid_noise_discount",
        lambda v, s: NOTHING if is_off(s.get("multires_noise_iterations")) else float(number(v)),
    ),
    turned("ip_noise_gamma", "loss.input_perturbation", unless_off),
    turned("ip_noise_gamma_random_strength", "loss.input_perturbation_random", switched(True)),
    turned("seed", "train.seed", to_number),
    turned("t5xxl_max_token_length", "text_encoders.t5_tokens", unless_off),
    turned("clip_l_dropout_rate", "text_encoders.clip_l_dropout", unless_off),
    turned("clip_g_dropout_rate", "text_encoders.clip_g_dropout", unless_off),
    turned("t5_dropout_rate", "text_encoders.t5_dropout", unless_off),
    never("apply_t5_attn_mask", "encoders and transformer attend to padding, as these models were trained"),
    never("apply_lg_attn_mask", "encoders and transformer attend to padding, as these models were trained"),
    turned("max_token_length", "data.max_tokens", to_number),
    turned("output_dir", "output.dir", lambda v, s: f"{v}/{s.get('output_name')}" if s.get("output_name") else v),
    turned("output_name", "output.name", unless_off),
    turned("save_model_as", "output.format", one_of({"safetensors": "kohya"}, "files are always safetensors here")),
    turned(
        "save_precision", "output.precision", lambda v, s: "fp32" if v is None else number_format(v, s), absent="float"
    ),
    turned("metadata_title", "output.title", unless_off),
    turned("metadata_author", "output.author", unless_off),
    turned("metadata_trigger_phrase", "output.trigger", unless_off),
    turned(
        "log_with",
        "output.tensorboard",
        lambda v, s: True if v in ("tensorboard", "all") else Lost("log.jsonl and TensorBoard are here"),
    ),
    *needless(
        "the run's folder holds its logs", "logging_dir log_prefix log_tracker_name log_config log_tracker_config"
    ),
    always("enable_bucket", "images go into buckets of their shape"),
    turned("train_batch_size", "data.batch_size", to_number),
    turned("resolution", "data.resolution", side),
    turned(
        "bucket_no_upscale",
        "data.upscale",
        inverted,
        absent=False,
        say="data.upscale is the opposite switch: bucket_no_upscale = true is data.upscale = false, the default",
    ),
    turned("bucket_reso_steps", "data.bucket_step", to_number),
    turned("min_bucket_reso", "data.min_bucket", to_number),
    turned("max_bucket_reso", "data.max_bucket", to_number),
    turned("dataset_repeats", "data.repeats", to_number),
    turned("caption_dropout_rate", "data.caption_dropout", to_float),
    *(
        always(name, "latents and captions are encoded once, on disk")
        for name in (
            "cache_latents",
            "cache_latents_to_disk",
            "cache_text_encoder_outputs",
            "cache_text_encoder_outputs_to_disk",
        )
    ),
    turned(
        "clip_skip",
        (),
        lambda v, s: (
            NOTHING if number(v) in (None, 0, 2) else Lost("always the penultimate layer, as these models were trained")
        ),
        say="always the penultimate layer, as these models were trained; remove it",
    ),
    *needless(
        "flame-train chooses it",
        "xformers sdpa mem_eff_attn lowram highvram max_data_loader_n_workers "
        "persistent_data_loader_workers vae_batch_size text_encoder_batch_size torch_compile "
        "dynamo_backend split_mode disable_mmap_load_safetensors skip_cache_check no_metadata "
        "split_attn use_safetensors t5xxl_device num_cpu_threads_per_process no_half_vae "
        "caption_extention v2 debug_dataset save_state save_state_on_train_end resume "
        "training_comment tokenizer_cache_dir console_log_level console_log_simple "
        "huggingface_repo_type config_file",
    ),
    never("fused_backward_pass", "a LoRA's gradients are small"),
    *(Row(name, (), _bf16_master) for name in ("full_bf16", "full_fp16")),
    never("blocks_to_swap", "weights stay on the GPU; model.quantize and gradient.checkpointing save memory"),
    never("validation_split", "validation is not in this version"),
    *(
        never(name, "uploads, wandb and several GPUs are not here")
        for name in (
            "huggingface_*",
            "wandb_*",
            "deepspeed",
            "ddp_*",
            "async_upload",
            "save_state_to_huggingface",
            "resume_from_huggingface",
        )
    ),
]

_CAPTIONS: Final = [
    never("shuffle_caption", "shuffled tags are not in this version"),
    never("caption_tag_dropout_rate", "single tags are not dropped; data.caption_dropout drops whole captions"),
    never("caption_dropout_every_n_epochs", "data.caption_dropout is a share of the images"),
    *needless(
        "read with shuffle_caption",
        "keep_tokens keep_tokens_separator caption_separator secondary_separator token_warmup_min token_warmup_step",
    ),
    *(
        never(name, "captions are taken as they are")
        for name in ("caption_prefix", "caption_suffix", "enable_wildcard")
    ),
    never("weighted_captions", "brackets in captions are taken as they are"),
    never("flip_aug", "images are encoded once; write flipped copies into the folder"),
    *(never(name, "images are encoded once, as they are") for name in ("color_aug", "face_crop_aug_range")),
    never("random_crop", "crops are centred, and encoded once"),
    *(never(name, "masks are not in this version") for name in ("masked_loss", "alpha_mask", "conditioning_data_dir")),
    *(never(name, "images for regularisation are not in this version") for name in ("reg_data_dir", "is_reg")),
    turned("prior_loss_weight", (), lambda v, s: NOTHING),
    *(never(name, "captions stand in text files or metadata.jsonl") for name in ("in_json", "metadata_file")),
]
"""Of captions and images; they stand in a config and in a dataset TOML."""

_SET_ROWS: Final = [
    same("image_dir", "set.path", say=""),
    turned("N_name", "set.folder_repeats", switched(True)),
    turned("num_repeats", "set.repeats", to_number),
    turned("resolution", "set.resolution", side),
    turned("batch_size", "set.batch_size", to_number),
    turned("class_tokens", "set.caption", unless_off),
    turned("caption_extension", "set.caption_extension", ending, absent=".caption"),
    turned("caption_dropout_rate", "set.caption_dropout", unless_off),
    always("enable_bucket", "images go into buckets of their shape"),
    turned("bucket_no_upscale", "set.upscale", inverted, absent=False),
    turned("bucket_reso_steps", "set.bucket_step", to_number),
    turned("min_bucket_reso", "set.min_bucket", to_number),
    turned("max_bucket_reso", "set.max_bucket", to_number),
    *needless("flame-train chooses it", "cache_info resize_interpolation caption_extention"),
]

PROGRAM: Final = Program(
    "sd-scripts",
    _is_mine,
    _read,
    [*_ROWS, *_CAPTIONS, *optimizer_keys("optimizer_args.")],
    [*_SET_ROWS, *_CAPTIONS],
)
