"""SimpleTuner's config in JSON, with the data backends and the LyCORIS config that it names."""

from __future__ import annotations

from typing import Final

from . import simpletuner_values as own
from .conversions import (
    MIN_SNR,
    SAMPLED,
    WARMUP,
    checkpoint,
    min_snr,
    number_format,
    optimizer,
    schedule,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
    warmup,
)
from .table import (
    NOTHING,
    Lost,
    Program,
    Row,
    is_off,
    needless,
    never,
    part_of,
    turned,
)

_ROWS: Final = [
    turned("pretrained_model_name_or_path", "model.checkpoint", own.base_model, absent=""),
    turned("pretrained_vae_model_name_or_path", "model.vae", checkpoint),
    turned("base_model_precision", "model.quantize", own.quantized),
    never("base_model_default_dtype", "the base model has train.precision"),
    turned("text_encoder_3_precision", "text_encoders.precision", own.quantized),
    turned("prediction_type", "model.prediction", own.prediction),
    turned("mixed_precision", "train.precision", number_format, absent="bf16"),
    turned("lora_type", "lora.kind", own.kind, absent="standard"),
    turned("lycoris.linear_dim", ("lora.rank", "lora.full_matrix"), own.lycoris_rank),
    turned("lycoris.linear_alpha", "lora.alpha", to_float),
    turned("lycoris.factor", "lora.factor", lambda v, s: v if s.get("lycoris.algo") == "lokr" and v > 0 else NOTHING),
    *part_of("lycoris.algo use_dora"),
    *needless("the same result here", "lycoris.multiplier lycoris.bypass_mode"),
    never("lycoris.*", "layers and their settings are lora.targets and [[lora.rules]]; write them by hand"),
    turned("lora_rank", "lora.rank", to_number),
    turned("lora_alpha", "lora.alpha", own.alpha),
    turned("(lora_alpha)", "lora.alpha", lambda v, s: float(s.get("lora_rank", 16)), absent="the rank"),
    turned("lora_dropout", "lora.dropout", unless_off),
    turned("flux_lora_target", "lora.targets", own.targets, absent="all", families=["flux"]),
    turned("(lora targets)", "lora.targets", own.targets, absent="all", families=["sdxl", "sd3"]),
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
    turned("max_train_steps", "train.steps", own.steps),
    turned("num_train_epochs", "train.epochs", unless_off),
    turned("train_batch_size", "data.batch_size", to_number),
    turned("gradient_accumulation_steps", "gradient.accumulation", to_number),
    turned("gradient_checkpointing", "gradient.checkpointing", switched("full")),
    turned("gradient_checkpointing_backend", (), lambda v, s: NOTHING),
    never("gradient_checkpointing_interval", "gradient.checkpoint_blocks takes globs over blocks"),
    turned("max_grad_norm", ("gradient.clip_norm", "gradient.clip_value"), own.clip, absent=2.0),
    *part_of("grad_clip_method"),
    turned("seed", "train.seed", lambda v, s: NOTHING if v in (None, -1) else v),
    turned("use_ema", "train.ema_decay", lambda v, s: float(s.get("ema_decay", 0.995)) if v else NOTHING),
    *part_of("ema_decay ema_device ema_update_interval ema_foreach_disable"),
    turned("loss_type", "loss.kind", own.loss),
    turned(
        "snr_gamma",
        MIN_SNR,
        lambda v, s: (
            min_snr(v, s)
            if not s.get("use_soft_min_snr")
            else {"loss.weighting": "soft_min_snr", "loss.snr_gamma": float(v)}
        ),
    ),
    *part_of("use_soft_min_snr"),
    turned("flow_schedule_shift", SAMPLED, own.levels, absent=3, families=["sd3", "flux"]),
    *part_of(
        "flow_schedule_shift flow_schedule_auto_shift flow_use_beta_schedule "
        "flow_use_uniform_schedule flow_sigmoid_scale flow_beta_schedule_alpha "
        "flow_beta_schedule_beta",
    ),
    turned("flux_guidance_mode", "loss.guidance_scale", own.guidance, absent="constant", families=["flux"]),
    *part_of("flux_guidance_value flux_guidance_min flux_guidance_max"),
    turned("offset_noise", "loss.offset_noise", lambda v, s: float(s.get("noise_offset", 0.1)) if v else NOTHING),
    *part_of("noise_offset noise_offset_probability"),
    turned("input_perturbation", "loss.input_perturbation", unless_off),
    turned("rescale_betas_zero_snr", "loss.zero_terminal_snr", switched(True)),
    turned("caption_dropout_probability", "data.caption_dropout", unless_off),
    turned("tokenizer_max_length", "text_encoders.t5_tokens", unless_off, families=["sd3", "flux"]),
    turned("resolution", "data.resolution", own.resolution),
    turned("aspect_bucket_alignment", "data.bucket_step", to_number),
    turned("output_dir", "output.dir", unless_off),
    turned("lora_format", "output.format", lambda v, s: "kohya" if v == "comfyui" else "diffusers", absent="diffusers"),
    turned(
        "report_to",
        "output.tensorboard",
        lambda v, s: (
            NOTHING if v == "none" else (True if v in ("tensorboard", "all") else Lost("set output.wandb to a project"))
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
        own.negative,
    ),
    turned("validation_guidance", "sample.guidance_scale", to_float),
    turned("validation_num_inference_steps", "sample.steps", to_number),
    turned("validation_resolution", ("sample.width", "sample.height"), own.sizes),
    turned("validation_seed", "sample.seed", lambda v, s: NOTHING if v is None else v),
    never("user_prompt_library", "prompts stand in sample.prompts"),
    never("validation_prompt_library", "prompts stand in sample.prompts"),
    never("validation_guidance_rescale", "guidance is not rescaled"),
    never("validation_guidance_skip_layers", "sampling without layers is not here"),
    turned("validation_disable_unconditional", (), lambda v, s: NOTHING),
    never("tread_config", "all tokens go through all blocks"),
    never("masked_loss_probability", "data.masks has masks for all images of a folder"),
    swapped("musubi_blocks_to_swap", "gradient_checkpointing"),
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
    turned("instance_data_dir", "set.path", own.folder),
    turned("resolution", "set.resolution", own.resolution),
    turned("repeats", "set.repeats", lambda v, s: v + 1),
    turned("instance_prompt", "set.caption", unless_off),
    Row("type", (), own.not_local),
    Row("caption_strategy", (), own.strategy),
    turned("train_batch_size", "set.batch_size", to_number),
    turned("is_regularisation_data", "set.regularization", switched(True)),
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
    Row(
        "prepend_instance_prompt",
        (),
        lambda v, s: NOTHING if is_off(v) else Lost("captions.prefix is a text: write the prompt there"),
    ),
    *needless(
        "nothing here depends on it",
        "id dataset_type resolution_type minimum_image_size maximum_image_size "
        "target_downsample_size cache_dir_vae cache_dir metadata_backend dataset_name text_embeds "
        "image_embeds skip_file_discovery preserve_data_backend_cache probability "
        "vae_cache_clear_each_epoch disabled disable write_batch_size",
    ),
]

PROGRAM: Final = Program("SimpleTuner", own.is_mine, own.read, _ROWS, _SET_ROWS)
