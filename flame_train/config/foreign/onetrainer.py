"""OneTrainer's JSON: presets, and configs as its window saves them, with the concepts and samples in files beside."""

from __future__ import annotations

from typing import Final

from . import onetrainer_values as own
from .conversions import (
    SAMPLED,
    STREAMED,
    WARMUP,
    checkpoint,
    number_format,
    one_of,
    optimizer,
    optimizer_keys,
    schedule,
    switched,
    to_float,
    to_number,
    unless_off,
)
from .encoders import TRAINED
from .table import (
    NOTHING,
    Changed,
    Lost,
    Program,
    Row,
    always,
    is_off,
    needless,
    never,
    part_of,
    same,
    turned,
)

_DENOISERS: Final = (("unet", ("sdxl",)), ("transformer", own.TRANSFORMERS))
_TEXT_PARTS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")

_ROWS: Final = [
    turned("base_model_name", "model.checkpoint", checkpoint),
    turned("vae.model_name", "model.vae", unless_off),
    *(turned(f"{part}.weight_dtype", "model.quantize", own.weights, families=those) for part, those in _DENOISERS),
    turned("weight_dtype", "model.quantize", own.weights),
    turned("force_v_prediction", "model.prediction", switched("v")),
    *needless("it is the default", "force_epsilon_prediction"),
    turned("train_dtype", "train.precision", number_format, absent="FLOAT_16"),
    turned("peft_type", "lora.kind", own.kind, absent="LORA"),
    same("lora_rank", "lora.rank"),
    turned("lora_alpha", "lora.alpha", to_float, absent=1.0),
    turned("lora_model_name", "lora.from", unless_off),
    turned(
        "lora_decompose_output_axis",
        "lora.wd_on_output",
        lambda v, s: True if v and s.get("lora_decompose") else NOTHING,
    ),
    *part_of("lora_decompose lora_decompose_norm_epsilon lora_weight_dtype"),
    *(
        turned(theirs, f"lora.{ours}", lambda v, s: v if s.get("peft_type") == "LOKR" and v and v != -1 else NOTHING)
        for theirs, ours in (
            ("lokr_dim", "rank"),
            ("lokr_decompose_both", "decompose_both"),
            ("lokr_decompose_factor", "factor"),
            ("lokr_full_matrix", "full_matrix"),
        )
    ),
    turned("layer_filter_preset", "lora.targets", own.targets, absent="full"),
    *part_of("layer_filter layer_filter_regex"),
    *(turned(f"{part}.learning_rate", "optimizer.lr", own.own_rate, families=those) for part, those in _DENOISERS),
    turned("learning_rate", "optimizer.lr", own.rate, absent=3e-6),
    *part_of("learning_rate_scaler"),
    turned("optimizer", "optimizer.name", optimizer),
    *(
        turned(f"optimizer.{name}", ("optimizer.betas", f"optimizer.{name}"), own.beta(name))
        for name in ("beta1", "beta2")
    ),
    *(row for row in optimizer_keys("optimizer.") if not row.key.startswith("optimizer.beta")),
    turned("learning_rate_scheduler", "schedule.name", schedule, absent="CONSTANT"),
    turned("learning_rate_warmup_steps", WARMUP, own.warmup, absent=200.0),
    turned(
        "learning_rate_cycles",
        "schedule.cycles",
        lambda v, s: int(v) if "RESTARTS" in str(s.get("learning_rate_scheduler", "")) else NOTHING,
    ),
    turned(
        "learning_rate_min_factor",
        "schedule.min_lr",
        lambda v, s: (
            NOTHING
            if is_off(v)
            else Changed(float(v) * float(s.get("learning_rate", 3e-6)), "a rate here, and no factor")
        ),
    ),
    never("custom_learning_rate_scheduler", "no class path stands in a config"),
    turned("epochs", "train.epochs", to_number, absent=100),
    turned("batch_size", "data.batch_size", to_number),
    turned("gradient_accumulation_steps", "gradient.accumulation", to_number),
    turned("clip_grad_norm", "gradient.clip_norm", lambda v, s: 0.0 if v is None else float(v)),
    turned(
        "gradient_checkpointing",
        "gradient.checkpointing",
        one_of(
            {"ON": "full", "OFF": "off", "CPU_OFFLOADED": "offload", True: "full", False: "off"},
            "expected ON, OFF or CPU_OFFLOADED",
        ),
    ),
    turned("layer_offload_fraction", "model.offload", own.streamed, say=STREAMED),
    *(
        turned(
            f"{part}.gradient_checkpointing", "gradient.checkpointing", switched("full"), families=those, absent=True
        )
        for part, those in _DENOISERS
    ),
    turned("ema", "train.ema_decay", own.rounds),
    *part_of("ema_decay"),
    turned("ema_update_interval", (), lambda v, s: NOTHING),
    turned("resolution", ("data.resolution", "data.resolutions"), own.resolutions, absent="512"),
    always("aspect_ratio_bucketing", "images go into buckets of their shape"),
    always("latent_caching", "latents and captions are encoded once, on disk"),
    turned("loss_weight_fn", ("loss.weighting", "loss.snr_gamma", "loss.p2_gamma"), own.weighting),
    *part_of("loss_weight_strength"),
    turned("mse_strength", "loss.kind", own.losses),
    turned("mae_strength", "loss.kind", own.losses),
    turned("huber_strength", "loss.kind", own.losses),
    turned("log_cosh_strength", "loss.kind", own.losses),
    *part_of("huber_delta"),
    turned("timestep_distribution", (*SAMPLED, "loss.mode_scale"), own.levels, absent="UNIFORM"),
    *part_of("noising_weight noising_bias timestep_shift dynamic_timestep_shifting"),
    turned("min_noising_strength", "loss.min_timestep", own.span("min")),
    turned("max_noising_strength", "loss.max_timestep", own.span("max")),
    turned("offset_noise_weight", "loss.offset_noise", unless_off),
    never("generalized_offset_noise", "loss.offset_noise has one strength for all noise levels"),
    turned("perturbation_noise_weight", "loss.input_perturbation", unless_off),
    turned("rescale_noise_scheduler_to_zero_terminal_snr", "loss.zero_terminal_snr", switched(True)),
    turned("transformer.guidance_scale", "loss.guidance_scale", to_float, families=["flux"]),
    turned("transformer.attention_mask", "text_encoders.t5_padding", switched("zeros"), families=["flux"]),
    *needless("Flux alone has it", "transformer.guidance_scale unet.guidance_scale transformer.attention_mask"),
    turned("dropout_probability", "lora.dropout", unless_off),
    *(
        turned(f"{part}.dropout_probability", f"text_encoders.{ours}", unless_off, families=[f])
        for part, ours, f in (
            ("text_encoder", "clip_l_dropout", "sdxl"),
            ("text_encoder_2", "clip_g_dropout", "sdxl"),
            ("text_encoder", "clip_l_dropout", "sd3"),
            ("text_encoder_2", "clip_g_dropout", "sd3"),
            ("text_encoder_3", "t5_dropout", "sd3"),
            ("text_encoder", "clip_l_dropout", "flux"),
            ("text_encoder_2", "t5_dropout", "flux"),
        )
    ),
    turned("(text encoders)", TRAINED, own.encoders, absent="by their switches"),
    *needless(
        "they follow from text_encoders.train", "text_encoder.* text_encoder_2.* text_encoder_3.* text_encoder_4.*"
    ),
    *(
        turned(
            f"{part}_layer_skip",
            (),
            lambda v, s: NOTHING if is_off(v) else Lost("always the layer that these models were trained with"),
        )
        for part in _TEXT_PARTS
    ),
    turned(
        "text_encoder_2_sequence_length",
        "text_encoders.t5_tokens",
        lambda v, s: v if s.family == "flux" and v in (77, 154, 256, 512) else NOTHING,
    ),
    *needless("one length for each family", "text_encoder_sequence_length"),
    turned("output_model_destination", ("output.dir", "output.name"), own.file),
    turned("output_model_format", "output.format", own.format),
    turned("output_dtype", "output.precision", number_format, absent="FLOAT_32"),
    turned("tensorboard", "output.tensorboard", switched(True)),
    turned("sample_after", ("sample.every", "sample.every_epochs"), own.interval("sample.every", "sample_after_unit")),
    turned(
        "backup_after",
        ("checkpoint.every", "checkpoint.every_epochs"),
        own.interval("checkpoint.every", "backup_after_unit"),
    ),
    turned(
        "save_every",
        ("checkpoint.every", "checkpoint.every_epochs"),
        own.interval("checkpoint.every", "save_every_unit"),
    ),
    turned("rolling_backup_count", "checkpoint.keep", lambda v, s: v if s.get("rolling_backup") else NOTHING),
    turned("samples", "sample.prompts", own.samples),
    turned("masked_training", "data.masks", switched("files")),
    turned("unmasked_weight", "data.mask_weight", own.with_masks),
    turned("normalize_masked_area_loss", "data.mask_normalize", own.with_masks),
    never("masked_prior_preservation_weight", "not taken over: see preservation.kind"),
    *part_of(
        "unmasked_probability",
    ),
    turned(
        "validate_after",
        ("validation.every", "validation.every_epochs"),
        own.interval("validation.every", "validate_after_unit"),
    ),
    *part_of("validation validate_after_unit"),
    never("loss_scaler", "a factor on the loss changes the step size; set optimizer.lr"),
    never("multi_gpu", "a run is one process on one GPU"),
    *needless(
        "flame-train chooses it, or nothing depends on it",
        "model_type training_method vae.* unet.* transformer.* backup_after_unit sample_after_unit "
        "save_every_unit rolling_backup validate_after* tensorboard_* samples_to_tensorboard "
        "workspace_dir cache_dir debug_* only_cache clear_cache_before_training dataloader_threads "
        "train_device temp_device fallback_train_dtype enable_autocast_cache attention_mechanism "
        "continue_last_backup include_train_config prevent_overwrites async_* fused_gradient_reduce "
        "gradient_reduce_precision device_indexes compile force_circular_padding frames "
        "vb_loss_strength embedding* preserve_embedding_norm bundle_additional_embeddings oft_* "
        "lokr_* sample_* non_ema_sampling backup_before_save save_skip_first save_filename_prefix "
        "scheduler_params custom_conditioning_image huggingface_cache_dir offline_mode __version",
    ),
]

_SET_ROWS: Final = [
    same("path", "set.path"),
    turned("balancing", ("set.repeats", "set.weight"), lambda v, s: own.as_set(own.repeats(v, s))),
    turned("type", ("set.validation", "set.regularization", "set.regularization_target"), own.concept_type),
    turned("validation_concept", "set.validation", switched(True)),
    turned(
        "text.prompt_source",
        "set.caption",
        lambda v, s: (
            NOTHING
            if v == "sample"
            else Lost("captions from one file or from file names: write a text file for each image")
        ),
    ),
    turned("image.resolution_override", (), lambda v, s: NOTHING),
    never("image.enable_resolution_override", "one resolution for all folders in this version"),
    turned("image.enable_random_flip", "set.flip", switched(True)),
    never("image.enable_fixed_flip", "images are mirrored at random, in half of their showings"),
    *(
        turned(f"image.enable_random_{name}", f"set.{name}", own.change(name))
        for name in ("brightness", "contrast", "saturation", "hue")
    ),
    *(never(f"image.enable_{kind}_*", "not here") for kind in ("random", "fixed")),
    Row(
        "image.enable_crop_jitter",
        (),
        lambda v, s: NOTHING if not v else Lost("crops are centred, or anywhere with data.random_crop"),
    ),
    turned("text.enable_tag_shuffling", "set.captions.shuffle", switched(True)),
    turned("text.keep_tags_count", "set.captions.keep_tokens", unless_off),
    turned("text.tag_delimiter", "set.captions.separator", unless_off),
    turned("text.tag_dropout_probability", "set.captions.tag_dropout", unless_off),
    never("text.caps_randomize_enable", "captions keep their capitals"),
    turned(
        "loss_weight",
        (),
        lambda v, s: NOTHING if v == 1.0 else Lost("of [[data.sets]] only those of regularization have a weight"),
    ),
    turned("include_subdirectories", (), lambda v, s: NOTHING),
    *needless(
        "nothing here depends on it",
        "name seed enabled image_variations text_variations balancing_strategy concept_stats "
        "concept_stats.* image.* text.* __version",
    ),
]


PROGRAM: Final = Program("OneTrainer", own.is_mine, own.read, _ROWS, _SET_ROWS)
