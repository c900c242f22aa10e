"""SimpleTuner's config in JSON, with the data backends and the LyCORIS config that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flame_train.errors import ConfigError

from .conversions import (
    MIN_SNR,
    SAMPLED,
    WARMUP,
    checkpoint,
    min_snr,
    number_format,
    optimizer,
    sampled,
    schedule,
    side,
    sides_of,
    switched,
    to_float,
    to_number,
    unless_off,
    warmup,
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
    is_off,
    needless,
    never,
    no_file,
    turned,
)

_FAMILIES: Final = ("sdxl", "sd3", "flux")
_DEFAULT_MODELS: Final = {
    "sdxl": "hf:stabilityai/stable-diffusion-xl-base-1.0",
    "sd3": "hf:stabilityai/stable-diffusion-3.5-large",
    "flux": "hf:black-forest-labs/FLUX.1-dev",
}
_TARGETS: Final = {
    "all": "attention",
    "all+ffs": "attention+mlp",
    "all+ffs+embedder": "attention+mlp",
    "context+ffs": "attention+mlp",
    "ai-toolkit": "full",
}


def _plain(tree: Tree) -> dict[str, Any]:
    """The settings without dashes; a config of its web interface has them in a table of their own."""
    inner = tree.get("config")
    if isinstance(inner, Mapping) and "_metadata" in tree:
        tree = inner
    return {name.lstrip("-"): value for name, value in tree.items()}


def _is_mine(tree: Tree) -> bool:
    own = ("model_family", "data_backend_config", "lora_type", "validation_prompt", "checkpoint_step_interval")
    return sum(name in _plain(tree) for name in own) >= 2


def _read(reading: Reading) -> Source:
    inner = isinstance(reading.tree.get("config"), Mapping) and "_metadata" in reading.tree
    at = ("config",) if inner else ()
    written = reading.tree["config"] if inner else reading.tree
    settings = {
        name.lstrip("-"): Setting(value, reading.place((*at, name)))
        for name, value in written.items()
        if not name.startswith("_")
    }
    family = settings.get("model_family")
    if family and family.value not in _FAMILIES:
        raise ConfigError(
            f"{family.place}: model_family = {family.value}: expected sdxl, sd3 or flux; others are not here"
        )
    kind = settings.get("model_type")
    if kind and kind.value != "lora":
        raise ConfigError(f"{kind.place}: model_type = {kind.value}: expected lora; a LoRA alone is trained here")
    flavour = settings.get("model_flavour")
    if flavour and "kontext" in str(flavour.value):
        raise ConfigError(f"{flavour.place}: model_flavour = {flavour.value}: models that edit images are not here")
    if (control := settings.get("controlnet")) and control.value:
        raise ConfigError(f"{control.place}: controlnet: a ControlNet is not trained here")
    notes: list[str] = []
    _unpack_lycoris(reading, settings, notes)
    return Source(str(family.value) if family else "", settings, _backends(reading, settings, notes), notes)


def _unpack_lycoris(reading: Reading, settings: dict[str, Setting], notes: list[str]) -> None:
    named = settings.pop("lycoris_config", None)
    if named is None or not named.value:
        return
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("lycoris_config", named, "what it holds is"))
        return
    settings |= {
        f"lycoris.{name}": setting for name, setting in other.flat(other.tree, whole=("apply_preset",)).items()
    }


def _backends(reading: Reading, settings: dict[str, Setting], notes: list[str]) -> list[dict[str, Setting]]:
    named = settings.pop("data_backend_config", None)
    if named is None or not named.value:
        return []
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("data_backend_config", named, "its folders are"))
        return []
    items = other.tree.get("", [])
    kinds = ("image", "", None, "eval")
    return [
        other.flat(one, ("", f"[{i}]"), whole=("conditioning",))
        for i, one in enumerate(items if isinstance(items, list) else [])
        if one.get("dataset_type", "image") in kinds and not one.get("disabled") and not one.get("disable")
    ]


def _kind(value: Any, source: Source) -> Any:
    if value == "standard":
        return "dora" if source.get("use_dora") else NOTHING
    algo = str(source.get("lycoris.algo", ""))
    if not algo:
        return Lost("LyCORIS, whose config is not beside this file")
    return algo if algo in ("lora", "locon", "loha", "lokr") else Lost(f"LyCORIS' {algo} is not here")


def _alpha(value: Any, source: Source) -> Any:
    return float(value if value is not None else source.get("lora_rank", 16))


def _targets(value: Any, source: Source) -> Any:
    if str(source.get("lora_type", "standard")) == "lycoris":
        return ["attention"]
    return (
        [_TARGETS[value]] if value in _TARGETS else Lost("no such choice of layers here: write globs into lora.targets")
    )


def _lycoris_rank(value: Any, source: Source) -> Any:
    """A rank above every layer's means matrices that are not decomposed, in LoKr."""
    if source.get("lycoris.algo") == "lokr" and value >= 4096:
        return {"lora.full_matrix": True}
    return {"lora.rank": value}


def _levels(value: Any, source: Source) -> Any:
    """Sigmoid of a normal number, shifted; or uniform, or by a beta distribution."""
    shift = 0.0 if source.get("flow_schedule_auto_shift") else float(source.get("flow_schedule_shift", 3))
    if source.get("flow_use_beta_schedule"):
        return sampled("beta", shift)
    if source.get("flow_use_uniform_schedule"):
        return sampled("uniform", shift)
    return sampled("logit_normal", shift, float(source.get("flow_sigmoid_scale", 1.0)))


def _quantized(value: Any, source: Source) -> Any:
    if value in ("no_change", None, ""):
        return NOTHING
    kind = str(value)
    return "fp8" if kind.startswith(("int8", "fp8")) else Changed("fp8", f"8 bits is the least here, {kind} there")


def _guidance(value: Any, source: Source) -> Any:
    if value != "constant":
        return Lost("loss.guidance_scale is one number")
    return float(source.get("flux_guidance_value", 1.0))


def _prediction(value: Any, source: Source) -> Any:
    return {
        "epsilon": NOTHING,
        "v_prediction": "v",
        "flow_matching": NOTHING if source.family != "sdxl" else "flow",
    }.get(value, Lost("epsilon, v and flow are here"))


def _loss(value: Any, source: Source) -> Any:
    return {"l2": NOTHING, "huber": "huber", "smooth_l1": "smooth_l1"}.get(value, Lost("no such loss here"))


def _clip(value: Any, source: Source) -> Any:
    """max_grad_norm is the largest norm or the largest value, as grad_clip_method says."""
    name = "gradient.clip_value" if source.get("grad_clip_method", "value") == "value" else "gradient.clip_norm"
    return {name: float(value)} | ({"gradient.clip_norm": 0.0} if name.endswith("value") else {})


def _steps(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else value


def _sizes(value: Any, source: Source) -> Any:
    sides = sides_of(str(value).split(",")[0] if "x" in str(value) else value)
    if not sides:
        return Lost("expected a size such as 1024x1024")
    return {"sample.width": sides[0], "sample.height": sides[-1] if len(sides) < 3 else sides[0]}


def _checkpoint(value: Any, source: Source) -> Any:
    if value:
        return checkpoint(value, source)
    default = _DEFAULT_MODELS.get(source.family)
    return Changed(default, "SimpleTuner's own choice for this family") if default else NOTHING


def _resolution(value: Any, source: Source) -> Any:
    """Pixels, or megapixels of an area."""
    if isinstance(value, int | float) and value < 64:
        return round((value * 1e6) ** 0.5 / 64) * 64
    return side(value, source)


def _folder(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else value


def _not_local(value: Any, source: Source) -> Any:
    return (
        NOTHING
        if value == "local"
        else Lost(f"images from {value}: download them into a folder, and name it in data.path")
    )


def _strategy(value: Any, source: Source) -> Any:
    return (
        NOTHING
        if value in ("textfile", "instanceprompt", "instance_prompt")
        else Lost("captions stand in text files or metadata.jsonl here")
    )


_ROWS: Final = [
    turned("pretrained_model_name_or_path", "model.checkpoint", _checkpoint, absent=""),
    turned("pretrained_vae_model_name_or_path", "model.vae", checkpoint),
    turned("base_model_precision", "model.quantize", _quantized),
    never("base_model_default_dtype", "the base model has train.precision"),
    turned(
        "text_encoder_3_precision",
        "text_encoders.precision",
        lambda v, s: NOTHING if v in ("no_change", None) else "fp8",
    ),
    turned("prediction_type", "model.prediction", _prediction),
    turned("mixed_precision", "train.precision", number_format, absent="bf16"),
    turned("lora_type", "lora.kind", _kind, absent="standard"),
    turned("lycoris.linear_dim", ("lora.rank", "lora.full_matrix"), _lycoris_rank),
    turned("lycoris.linear_alpha", "lora.alpha", to_float),
    turned("lycoris.factor", "lora.factor", lambda v, s: v if s.get("lycoris.algo") == "lokr" and v > 0 else NOTHING),
    *needless("read with lora_type", "lycoris.algo use_dora"),
    *needless("the same result here", "lycoris.multiplier lycoris.bypass_mode"),
    never("lycoris.*", "layers and their settings are lora.targets and [[lora.rules]]; write them by hand"),
    turned("lora_rank", "lora.rank", to_number),
    turned("lora_alpha", "lora.alpha", _alpha),
    turned("(lora_alpha)", "lora.alpha", lambda v, s: float(s.get("lora_rank", 16)), absent="the rank"),
    turned("lora_dropout", "lora.dropout", unless_off),
    turned("flux_lora_target", "lora.targets", _targets, absent="all", families=["flux"]),
    turned("(lora targets)", "lora.targets", _targets, absent="all", families=["sdxl", "sd3"]),
    turned("init_lora", "lora.from", unless_off),
    turned("learning_rate", "optimizer.lr", to_float),
    turned("optimizer", "optimizer.name", optimizer),
    never("optimizer_config", "an optimizer's own keys stand in [optimizer]; write them by hand"),
    turned("lr_scheduler", "schedule.name", schedule, absent="sine"),
    turned("lr_warmup_steps", WARMUP, warmup),
    turned(
        "lr_num_cycles",
        "schedule.cycles",
        lambda v, s: v if s.get("lr_scheduler") == "cosine_with_restarts" else NOTHING,
    ),
    turned("lr_power", "schedule.power", lambda v, s: float(v) if s.get("lr_scheduler") == "polynomial" else NOTHING),
    turned(
        "lr_end",
        "schedule.min_lr",
        lambda v, s: float(v) if s.get("lr_scheduler") in ("polynomial", "cosine", "linear") else NOTHING,
    ),
    never("lr_scale*", "optimizer.lr is the rate itself; multiply it by hand"),
    turned("max_train_steps", "train.steps", _steps),
    turned("num_train_epochs", "train.epochs", unless_off),
    turned("train_batch_size", "data.batch_size", to_number),
    turned("gradient_accumulation_steps", "gradient.accumulation", to_number),
    turned("gradient_checkpointing", "gradient.checkpointing", switched("full")),
    turned("gradient_checkpointing_backend", (), lambda v, s: NOTHING),
    never("gradient_checkpointing_interval", "gradient.checkpoint_blocks takes globs over blocks"),
    turned("max_grad_norm", ("gradient.clip_norm", "gradient.clip_value"), _clip, absent=2.0),
    *needless("read with max_grad_norm", "grad_clip_method"),
    turned("seed", "train.seed", lambda v, s: NOTHING if v in (None, -1) else v),
    turned("use_ema", "train.ema_decay", lambda v, s: float(s.get("ema_decay", 0.995)) if v else NOTHING),
    *needless("read with use_ema", "ema_decay ema_device ema_update_interval ema_foreach_disable"),
    turned("loss_type", "loss.kind", _loss),
    turned(
        "snr_gamma",
        MIN_SNR,
        lambda v, s: (
            min_snr(v, s)
            if not s.get("use_soft_min_snr")
            else {"loss.weighting": "soft_min_snr", "loss.snr_gamma": float(v)}
        ),
    ),
    *needless("read with snr_gamma", "use_soft_min_snr"),
    turned("flow_schedule_shift", SAMPLED, _levels, absent=3, families=["sd3", "flux"]),
    *needless(
        "read with flow_schedule_shift, for flow models alone",
        "flow_schedule_shift flow_schedule_auto_shift flow_use_beta_schedule "
        "flow_use_uniform_schedule flow_sigmoid_scale flow_beta_schedule_alpha "
        "flow_beta_schedule_beta",
    ),
    turned("flux_guidance_mode", "loss.guidance_scale", _guidance, absent="constant", families=["flux"]),
    *needless("read with flux_guidance_mode", "flux_guidance_value flux_guidance_min flux_guidance_max"),
    turned("offset_noise", "loss.offset_noise", lambda v, s: float(s.get("noise_offset", 0.1)) if v else NOTHING),
    *needless("read with offset_noise", "noise_offset noise_offset_probability"),
    turned("input_perturbation", "loss.input_perturbation", unless_off),
    turned("rescale_betas_zero_snr", "loss.zero_terminal_snr", switched(True)),
    turned("caption_dropout_probability", "data.caption_dropout", unless_off),
    turned("tokenizer_max_length", "text_encoders.t5_tokens", unless_off, families=["sd3", "flux"]),
    turned("resolution", "data.resolution", _resolution),
    turned("aspect_bucket_alignment", "data.bucket_step", to_number),
    turned("output_dir", "output.dir", unless_off),
    turned("lora_format", "output.format", lambda v, s: "kohya" if v == "comfyui" else "diffusers", absent="diffusers"),
    turned(
        "report_to",
        "output.tensorboard",
        lambda v, s: (
            NOTHING
            if v == "none"
            else (True if v in ("tensorboard", "all") else Lost("log.jsonl and TensorBoard are here"))
        ),
    ),
    *(turned(name, "checkpoint.every", unless_off) for name in ("checkpoint_step_interval", "checkpointing_steps")),
    turned("checkpoint_epoch_interval", "checkpoint.every_epochs", unless_off),
    turned("checkpoints_total_limit", "checkpoint.keep", to_number),
    *(turned(name, "sample.every", unless_off) for name in ("validation_step_interval", "validation_steps")),
    turned("validation_epoch_interval", "sample.every_epochs", unless_off),
    turned("validation_prompt", "sample.prompts", lambda v, s: [v] if v else NOTHING),
    turned(
        "validation_negative_prompt",
        "sample.negative",
        lambda v, s: NOTHING if is_off(v) else (Lost("Flux has no negative prompt") if s.family == "flux" else v),
    ),
    turned("validation_guidance", "sample.guidance_scale", to_float),
    turned("validation_num_inference_steps", "sample.steps", to_number),
    turned("validation_resolution", ("sample.width", "sample.height"), _sizes),
    turned("validation_seed", "sample.seed", lambda v, s: NOTHING if v is None else v),
    never("user_prompt_library", "prompts stand in sample.prompts"),
    never("validation_prompt_library", "prompts stand in sample.prompts"),
    never("validation_guidance_rescale", "guidance is not rescaled"),
    never("validation_guidance_skip_layers", "sampling without layers is not here"),
    turned("validation_disable_unconditional", (), lambda v, s: NOTHING),
    never("tread_config", "all tokens go through all blocks"),
    never("masked_loss_probability", "masks are not in this version"),
    never("musubi_blocks_to_swap", "weights stay on the GPU; model.quantize and gradient.checkpointing save memory"),
    never("caption_strategy", "captions stand in text files or metadata.jsonl here"),
    *(never(name, "uploads to the hub are not here") for name in ("push_to_hub", "push_checkpoints_to_hub")),
    *(
        never(pattern, "not in this version")
        for pattern in (
            "ramtorch*",
            "crepa_*",
            "sla_*",
            "*_distillation*",
            "distillation_*",
            "eval_*",
            "scheduled_sampling_*",
        )
    ),
    *needless(
        "flame-train chooses it, or nothing depends on it",
        "model_family model_type model_flavour controlnet disable_bucket_pruning "
        "fuse_qkv_projections hub_model_id quantize_via tracker_* vae_batch_size num_eval_images "
        "resume_from_checkpoint attention_mechanism minimum_image_size resolution_type "
        "disable_benchmark aspect_bucket_rounding dataloader_prefetch* write_batch_size "
        "text_encoder_batch_size compress_disk_cache delete_* i_know_what_i_am_doing "
        "skip_file_discovery vae_dtype num_validation_images validation_torch_compile "
        "validation_noise_scheduler torch_num_threads cache_dir* logging_dir "
        "metadata_update_interval max_workers image_processing_batch_size "
        "preserve_data_backend_cache override_dataset_config dynamo_* validation_num_video_frames "
        "offload_* vae_cache_ondemand validation_on_startup",
    ),
]

_SET_ROWS: Final = [
    turned("instance_data_dir", "set.path", _folder),
    turned("resolution", "set.resolution", _resolution),
    turned("repeats", "set.repeats", lambda v, s: v + 1),
    turned("instance_prompt", "set.caption", unless_off),
    Row("type", (), _not_local),
    Row("caption_strategy", (), _strategy),
    turned("train_batch_size", "set.batch_size", to_number),
    never("is_regularisation_data", "images for regularisation are not in this version"),
    turned("crop", (), lambda v, s: NOTHING),
    turned(
        "crop_aspect",
        (),
        lambda v, s: (
            Lost("images go into buckets of their shape; crop them to squares beforehand")
            if v == "square" and s is not None
            else NOTHING
        ),
    ),
    turned("crop_style", (), lambda v, s: NOTHING if v in ("center", "centre") else Lost("crops are centred")),
    never("only_instance_prompt", "data.caption is for images without a caption"),
    never("prepend_instance_prompt", "prefixes of captions are not in this version"),
    *needless(
        "nothing here depends on it",
        "id dataset_type resolution_type minimum_image_size maximum_image_size "
        "target_downsample_size cache_dir_vae cache_dir metadata_backend dataset_name text_embeds "
        "image_embeds skip_file_discovery preserve_data_backend_cache probability "
        "vae_cache_clear_each_epoch disabled disable write_batch_size",
    ),
]

PROGRAM: Final = Program("SimpleTuner", _is_mine, _read, _ROWS, _SET_ROWS)
