"""ai-toolkit's jobs in YAML, whose layout EriDiffusion's jobs have too."""

from __future__ import annotations

from typing import Final

from . import ai_toolkit_values as own
from .conversions import (
    MIN_SNR,
    SAMPLED,
    STREAMED,
    checkpoint,
    ending,
    min_snr,
    number_format,
    optimizer,
    optimizer_keys,
    sampler,
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

_DIFFERENTIAL, _BLANK = "train.diff_output_preservation", "train.blank_prompt_preservation"
_KEPT: Final = ("preservation.kind", "preservation.weight", "preservation.class_word")

_ROWS: Final = [
    turned("training_folder", "output.dir", lambda v, s: f"{v}/{s.get('name')}" if s.get("name") else v),
    turned("name", "output.name", unless_off),
    turned("trigger_word", ("captions.trigger", "output.trigger"), own.trigger),
    turned("network.type", "lora.kind", own.kind, absent="lora"),
    *(turned(f"network.{name}", "lora.rank", to_number) for name in ("rank", "linear")),
    turned("(network.linear)", "lora.rank", to_number, absent=4),
    turned("network.linear_alpha", "lora.alpha", own.alpha, absent=1.0),
    turned("network.alpha", "lora.alpha", own.alpha),
    turned("network.conv", "lora.conv_rank", lambda v, s: v if s.family == "sdxl" and v else NOTHING),
    turned("network.conv_alpha", "lora.conv_alpha", lambda v, s: float(v) if s.family == "sdxl" and v else NOTHING),
    turned("(layers)", "lora.targets", own.targets, absent="all"),
    turned("network.lokr_full_rank", "lora.full_matrix", own.lokr_full, absent=True),
    turned("network.lokr_factor", "lora.factor", lambda v, s: v if v and v > 0 else NOTHING),
    turned("network.dropout", "lora.dropout", unless_off),
    turned("network.pretrained_lora_path", "lora.from", unless_off),
    *(
        never(f"network.network_kwargs.{name}", "lora.targets takes globs; write them by hand")
        for name in ("only_if_contains", "ignore_if_contains")
    ),
    turned("save.dtype", "output.precision", number_format, absent="float16"),
    same("save.save_every", "checkpoint.every"),
    same("save.max_step_saves_to_keep", "checkpoint.keep"),
    turned("save.save_format", "output.format", lambda v, s: "diffusers" if v == "diffusers" else NOTHING),
    *(never(f"save.{name}", "uploads to the hub are not here") for name in ("push_to_hub", "hf_repo_id", "hf_private")),
    turned("train.batch_size", "data.batch_size", to_number),
    turned("train.steps", "train.steps", to_number, absent=1000),
    *(
        turned(f"train.{name}", "gradient.accumulation", lambda v, s: v if v and v > 1 else NOTHING)
        for name in ("gradient_accumulation_steps", "gradient_accumulation")
    ),
    always("train.train_unet", "the denoiser is what is trained"),
    turned("train.train_text_encoder", TRAINED, own.encoders),
    *part_of("train.text_encoder_lr"),
    turned("train.gradient_checkpointing", "gradient.checkpointing", switched("full"), absent=True),
    *needless("it follows from the model", "train.noise_scheduler"),
    turned("train.optimizer", "optimizer.name", optimizer, absent="adamw"),
    *(turned(f"train.{name}", "optimizer.lr", to_float) for name in ("unet_lr", "lr")),
    *optimizer_keys("train.optimizer_params."),
    turned("train.lr_scheduler", "schedule.name", schedule, absent="constant"),
    never("train.lr_scheduler_params.*", "the schedule's own keys stand in [schedule]; write them by hand"),
    turned("train.max_grad_norm", "gradient.clip_norm", to_float),
    turned("train.ema_config.use_ema", "train.ema_decay", own.ema),
    *part_of("train.ema_config.ema_decay"),
    turned("train.dtype", "train.precision", number_format, absent="fp32"),
    *(turned(f"train.{name}", MIN_SNR, min_snr) for name in ("min_snr_gamma", "snr_gamma")),
    turned("train.noise_offset", "loss.offset_noise", unless_off),
    turned(
        "train.optimal_noise_pairing_samples",
        "loss.immiscible_noise",
        lambda v, s: NOTHING if not v or v == 1 else Changed(True, "pairs within a batch"),
    ),
    turned(
        "train.loss_type",
        "loss.kind",
        lambda v, s: {"mse": NOTHING, "mae": "l1"}.get(v, Lost("loss.kind has mse, l1, huber and smooth_l1")),
    ),
    turned("train.timestep_type", SAMPLED, own.levels, absent="sigmoid", families=own.FLOW),
    turned("train.timestep_type", SAMPLED, own.levels),
    turned("train.min_denoising_steps", "loss.min_timestep", unless_off),
    turned("train.max_denoising_steps", "loss.max_timestep", lambda v, s: NOTHING if v >= 999 else v + 1),
    turned("train.prompt_dropout_prob", "data.caption_dropout", unless_off),
    *needless(
        "flame-train chooses it",
        "train.skip_first_sample train.disable_sampling train.xformers train.sdp "
        "train.attention_backend train.unload_text_encoder train.cache_text_embeddings "
        "train.switch_boundary_every train.force_first_sample performance_log_every device "
        "sqlite_db_path log_dir logging.* model.low_vram model.is_* model.compile "
        "model.qtype model.model_kwargs network.transformer_only "
        "network.old_lokr_format sample.format sample.fps sample.num_frames "
        "train.bypass_guidance_embedding",
    ),
    never("train.linear_timesteps*", "a weight of noise levels that is ai-toolkit's own"),
    never("train.content_or_style*", "loss.timestep_sampling has the distributions of noise levels"),
    *part_of("train.reg_weight"),
    turned(_DIFFERENTIAL, _KEPT, own.kept("class", _DIFFERENTIAL)),
    turned(_BLANK, _KEPT, own.kept("blank", _BLANK)),
    *part_of(f"{_DIFFERENTIAL}_multiplier {_DIFFERENTIAL}_class {_BLANK}_multiplier"),
    *(
        never(f"train.{name}", "preservation.kind has class, blank and slider")
        for name in (
            "inverted_mask_prior*",
            "do_differential_guidance",
            "do_guidance_loss*",
            "differential_guidance_scale",
        )
    ),
    turned("model.arch", "model.kontext", lambda v, s: True if v == "flux_kontext" else NOTHING),
    turned("model.name_or_path", "model.checkpoint", checkpoint),
    turned("model.vae_path", "model.vae", unless_off),
    turned("model.attn_masking", "text_encoders.t5_padding", switched("zeros"), families=["flux"]),
    *needless("Flux alone has it", "model.attn_masking"),
    turned("model.is_v_pred", "model.prediction", switched("v")),
    turned("model.quantize", "model.quantize", own.quantized),
    turned("model.quantize_te", "text_encoders.precision", lambda v, s: "fp8" if v and s.family != "sdxl" else NOTHING),
    *part_of("model.qtype_te"),
    turned("model.assistant_lora_path", "model.training_adapter", unless_off),
    never(
        "model.lora_path",
        "lora.from begins with a LoRA and trains it; merge this one into the base with `flame-train merge`",
    ),
    turned(
        "model.layer_offloading",
        ("model.offload", "gradient.checkpointing"),
        own.offloaded,
        say=STREAMED,
    ),
    *part_of("model.layer_offloading_transformer_percent"),
    never("model.layer_offloading_text_encoder_percent", "text encoders are loaded whole, before the denoiser"),
    turned("sample.sample_every", "sample.every", own.every, absent=100),
    turned("sample.sampler", "sample.sampler", sampler),
    same("sample.width", "sample.width"),
    same("sample.height", "sample.height"),
    turned("sample.prompts", "sample.prompts", own.prompts),
    turned("sample.samples", "sample.prompts", own.prompts),
    turned("sample.neg", "sample.negative", own.negative),
    turned("sample.seed", "sample.seed", own.seed),
    Row("sample.walk_seed", (), own.walk),
    turned("sample.guidance_scale", "sample.guidance_scale", to_float),
    turned("sample.sample_steps", "sample.steps", to_number),
    *needless("the first grid follows sample.every", "sample.sample_start_step"),
    *(
        never(pattern, "ai-toolkit's own, and off by default there")
        for pattern in ("train.*", "model.*", "network.*", "sample.*", "adapter.*", "slider.*", "embedding.*", "save.*")
    ),
]

_SET_ROWS: Final = [
    turned("shuffle_tokens", "set.captions.shuffle", switched(True)),
    turned("keep_tokens", "set.captions.keep_tokens", unless_off),
    turned("token_dropout_rate", "set.captions.tag_dropout", unless_off),
    turned("trigger_word", "set.captions.trigger", unless_off),
    turned("flip_x", "set.flip", switched(True)),
    never("flip_y", "images are mirrored left to right alone"),
    *(
        never(name, "data.random_crop, brightness, contrast, saturation and hue are what there is")
        for name in ("augmentations", "augments", "random_scale")
    ),
    turned("random_crop", "set.random_crop", switched(True)),
    turned("alpha_mask", "set.masks", switched("alpha")),
    turned(
        "mask_path",
        ("set.masks", "set.mask_folder"),
        lambda v, s: NOTHING if is_off(v) else {"set.masks": "files", "set.mask_folder": v},
    ),
    turned("mask_min_value", "set.mask_weight", unless_off),
    never("invert_mask", "white is where an image counts"),
    turned("is_reg", "set.regularization", switched(True)),
    turned("reg_weight", "set.regularization_weight", to_float),
    turned(
        "prior_reg",
        ("set.regularization", "set.regularization_target"),
        lambda v, s: NOTHING if is_off(v) else {"set.regularization": True, "set.regularization_target": "base"},
    ),
    turned("control_path", "set.control", unless_off),
    same("folder_path", "set.path"),
    same("dataset_path", "set.path"),
    turned("caption_ext", "set.caption_extension", ending),
    turned("caption_type", "set.caption_extension", ending),
    turned("caption_dropout_rate", "set.caption_dropout", unless_off),
    turned("resolution", ("set.resolution", "set.resolutions"), own.resolutions, absent=512),
    turned("num_repeats", "set.repeats", to_number),
    turned("default_caption", "set.caption", unless_off),
    *(
        always(name, "latents and captions are encoded once, on disk")
        for name in ("cache_latents", "cache_latents_to_disk", "cache_text_embeddings")
    ),
    always("buckets", "images go into buckets of their shape"),
    *needless(
        "flame-train chooses it",
        "num_workers prefetch_factor type num_frames shrink_video_to_frames do_i2v fps controls enabled",
    ),
    turned("network_weight", (), lambda v, s: NOTHING if v == 1 else Lost("each image has the weight of all others")),
]

PROGRAM: Final = Program("ai-toolkit", own.is_mine, own.read, _ROWS, _SET_ROWS)
