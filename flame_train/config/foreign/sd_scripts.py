"""sd-scripts: its TOML, flat or in sections, its dataset TOML, and a saved command line."""

from __future__ import annotations

from typing import Final

from . import sd_scripts_values as own
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
    sampler,
    schedule,
    side,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
    warmup,
    weighting,
    where,
)
from .encoders import TRAINED
from .table import (
    NOTHING,
    Lost,
    Program,
    Row,
    always,
    is_off,
    keep,
    needless,
    never,
    part_of,
    same,
    turned,
)

_EPOCHS_KEPT: Final = "`checkpoint.keep` counts checkpoints"


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
        "network_module", "lora.kind", own.kind, say="lora.kind says which kind of adapter; remove it for a plain LoRA"
    ),
    turned("network_dim", "lora.rank", to_number, absent=4),
    turned("network_alpha", "lora.alpha", to_float, absent=1.0),
    turned("(layers)", "lora.targets", own.targets, absent="all"),
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
    *part_of("network_args.algo network_args.preset network_args.dora_wd network_args.verbose"),
    *part_of("network_args.train_t5xxl"),
    never("network_args.loraplus_text_encoder_lr_ratio", "optimizer.lora_plus_ratio holds for text encoders, too"),
    never("network_args.*", "ranks and rates of single layers are [[lora.rules]]; write them by hand"),
    turned("network_dropout", "lora.dropout", unless_off),
    turned("scale_weight_norms", "lora.max_norm", unless_off),
    turned("network_weights", "lora.from", unless_off),
    turned("dim_from_weights", "lora.from_resize", switched(True)),
    turned("(text encoders)", TRAINED, own.encoders, absent="trained"),
    Row(
        "network_train_unet_only",
        (),
        lambda v, s: NOTHING,
        say="always on: no text encoder is trained unless text_encoders.train names it; remove it",
    ),
    never("network_train_text_encoder_only", "the denoiser is always trained; [[lora.rules]] can leave out its layers"),
    *(
        Row(name, (), lambda v, s: NOTHING, say="text_encoders.lr is the rate of those that text_encoders.train names")
        for name in own.ENCODER_RATES
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
        own.schedule_ratio,
        say="schedule.min_lr is a rate, and no ratio: multiply by optimizer.lr",
    ),
    never("lr_decay_steps", "schedule.decay is a share of the run, and no number of steps: divide by train.steps"),
    never("lr_scheduler_type", "no class path stands in a config; schedule.name has the schedules"),
    never("lr_scheduler_args.*", "no class path stands in a config; schedule.name has the schedules"),
    turned(
        "max_train_epochs", "train.epochs", unless_off, say="train.epochs counts epochs, train.steps optimizer steps"
    ),
    turned("max_train_steps", "train.steps", own.steps, absent=1600),
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
            own.kept,
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
    turned("sample_prompts", "sample.prompt_file", unless_off),
    turned("sample_sampler", "sample.sampler", sampler),
    never("sample_at_first", "grids come after steps, none before the first"),
    turned("gradient_accumulation_steps", "gradient.accumulation", to_number),
    turned(
        "gradient_checkpointing",
        "gradient.checkpointing",
        lambda v, s: NOTHING if is_off(v) else ("offload" if s.get("cpu_offload_checkpointing") else "full"),
    ),
    *part_of("cpu_offload_checkpointing"),
    turned("max_grad_norm", "gradient.clip_norm", to_float),
    turned("min_snr_gamma", MIN_SNR, min_snr),
    turned(
        "debiased_estimation_loss", "loss.weighting", weighting("debiased"), say='write loss.weighting = "debiased"'
    ),
    never("scale_v_pred_loss_like_noise_pred", "loss.weighting has min-SNR and soft min-SNR for v"),
    never("v_pred_like_loss", "loss.weighting has min-SNR and soft min-SNR for v"),
    turned("loss_type", ("loss.kind", "loss.huber_schedule"), own.loss),
    turned("huber_schedule", "loss.huber_schedule", where("loss_type", own.HUBERS, keep)),
    turned("huber_c", "loss.huber_c", where("loss_type", own.HUBERS, to_float)),
    turned("huber_scale", "loss.huber_scale", where("loss_type", own.HUBERS, to_float)),
    turned(
        "timestep_sampling",
        (*SAMPLED, "loss.weighting", "loss.mode_scale"),
        own.noise_levels_flux,
        absent="sigma",
        families=["flux"],
    ),
    turned(
        "weighting_scheme",
        (*SAMPLED, "loss.weighting", "loss.mode_scale"),
        own.noise_levels_sd3,
        absent="uniform",
        families=["sd3"],
    ),
    *part_of(
        "weighting_scheme training_shift logit_mean logit_std mode_scale discrete_flow_shift sigmoid_scale",
    ),
    Row("timestep_sampling", (), lambda v, s: Lost("flow models alone have it in sd-scripts")),
    Row("model_prediction_type", (), own.raw, "sigma_scaled", ("flux",), say="always raw; remove it"),
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
    never(
        "apply_t5_attn_mask",
        "encoders and transformer attend to padding, as these models were trained; nearest is "
        'text_encoders.t5_padding = "masked", with which the transformer sees zeros in its place',
    ),
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
        lambda v, s: True if v in ("tensorboard", "all") else Lost("set output.wandb to a project"),
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
        say="data.upscale is the opposite switch: bucket_no_upscale = true is data.upscale = false, the default",
    ),
    turned("bucket_reso_steps", "data.bucket_step", to_number),
    turned("min_bucket_reso", "data.min_bucket", to_number),
    turned("max_bucket_reso", "data.max_bucket", to_number),
    turned("dataset_repeats", "data.repeats", to_number),
    turned("caption_extension", "data.caption_extension", ending),
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
    *(Row(name, (), own.bf16_master) for name in ("full_bf16", "full_fp16")),
    swapped("blocks_to_swap", "gradient_checkpointing"),
    turned("validation_split", "validation.fraction", unless_off),
    turned("validate_every_n_steps", "validation.every", unless_off),
    turned("validate_every_n_epochs", "validation.every_epochs", unless_off),
    *part_of("validation_seed max_validation_steps"),
    Row("masked_loss", (), lambda v, s: NOTHING, say="data.masks says where masks come from"),
    Row("prior_loss_weight", (), lambda v, s: NOTHING, say="regularization_weight of the set in [[data.sets]]"),
    never("reg_data_dir", "a set of its own: [[data.sets]] with regularization = true"),
    *(
        never(name, "uploads are not here; output.wandb names a project")
        for name in (
            "huggingface_*",
            "wandb_*",
            "async_upload",
            "save_state_to_huggingface",
            "resume_from_huggingface",
        )
    ),
    *(never(name, "docs/several-gpus.md says how several GPUs are used") for name in ("deepspeed", "ddp_*")),
]


def _of_images(data: str, captions: str) -> list[Row]:
    """Rows about captions and images; they stand in a config and in a dataset TOML."""
    return [
        turned("shuffle_caption", f"{captions}.shuffle", switched(True)),
        turned("keep_tokens", f"{captions}.keep_tokens", unless_off),
        turned("keep_tokens_separator", f"{captions}.keep_separator", unless_off),
        turned("caption_separator", f"{captions}.separator", unless_off),
        turned("caption_tag_dropout_rate", f"{captions}.tag_dropout", unless_off),
        turned("caption_prefix", f"{captions}.prefix", unless_off),
        turned("caption_suffix", f"{captions}.suffix", unless_off),
        turned("enable_wildcard", f"{captions}.wildcards", switched(True)),
        turned("flip_aug", f"{data}.flip", switched(True)),
        turned("random_crop", f"{data}.random_crop", switched(True)),
        turned("alpha_mask", f"{data}.masks", switched("alpha"), say='data.masks = "alpha" is this switch'),
        turned(
            "conditioning_data_dir",
            (f"{data}.masks", f"{data}.mask_folder"),
            own.masks(data),
            say='data.mask_folder is a folder of masks, with data.masks = "files"; control images are not here',
        ),
        never("caption_dropout_every_n_epochs", "data.caption_dropout is a share of the images"),
        never("secondary_separator", "captions.separator is the one that there is"),
        *part_of("token_warmup_min"),
        never("token_warmup_step", "all tags are there from the first step on"),
        never("weighted_captions", "brackets in captions are taken as they are"),
        never("color_aug", "data.brightness, contrast, saturation and hue say how much; set them by hand"),
        never("face_crop_aug_range", "data.random_crop crops anywhere"),
        *(
            never(name, "captions stand in text files, metadata.jsonl, metadata.csv or meta_cap.json")
            for name in ("in_json", "metadata_file")
        ),
    ]


_SET_ROWS: Final = [
    turned("is_reg", "set.regularization", switched(True)),
    turned("validation_split", "set.validation", own.held_out),
    *part_of("validation_seed"),
    turned("prior_loss_weight", "set.regularization_weight", to_float),
    same("image_dir", "set.path"),
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
    own.is_mine,
    own.read,
    [*_ROWS, *_of_images("data", "captions"), *optimizer_keys("optimizer_args.")],
    [*_SET_ROWS, *_of_images("set", "set.captions")],
)
