"""diffusion-pipe's TOML, and the dataset TOML that it names."""

from __future__ import annotations

from typing import Final

from . import diffusion_pipe_values as own
from .conversions import (
    MIN_SNR,
    OPTIMI,
    checkpoint,
    min_snr,
    number_format,
    optimizer,
    optimizer_keys,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
    usual_of_library,
    weighting,
)
from .encoders import TRAINED
from .table import (
    NOTHING,
    Program,
    Row,
    needless,
    never,
    part_of,
    same,
    turned,
)

_SPEED: Final = "it changes how fast a run is, and what it shows"
_SAMPLED: Final = ("loss.timestep_sampling", "loss.shift", "loss.logit_std")


_ROWS: Final = [
    turned("model.checkpoint_path@models/sdxl.py:386", "model.checkpoint", checkpoint),
    turned("model.transformer_path@models/qwen_image.py:252", "model.checkpoint", checkpoint),
    turned("model.diffusion_model@models/base.py:641", "model.checkpoint", checkpoint),
    turned("model.diffusers_path@models/qwen_image.py:204", "model.checkpoint", own.folder),
    *(
        turned(name, "model.vae", unless_off)
        for name in ("model.vae@models/base.py:551", "model.vae_path@models/cosmos_predict2.py:210")
    ),
    turned("model.text_encoders@models/base.py:577", "text_encoders.qwen3", own.encoder),
    turned("model.text_encoder_path@models/qwen_image.py:202", "text_encoders.qwen3", unless_off),
    turned("model.qwen_path", "text_encoders.qwen3", unless_off),  # of a fork for Anima
    turned("model.llm_path@models/cosmos_predict2.py:249", "text_encoders.qwen3", unless_off),
    turned("model.merge_adapters@models/base.py:644", "model.training_adapter", own.merged),
    turned("model.v_pred@models/sdxl.py:374", "model.prediction", switched("v")),
    turned("model.dtype@107", "train.precision", number_format),
    *(
        turned(name, "model.quantize", own.float8)
        for name in ("model.transformer_dtype@109", "model.diffusion_model_dtype@111")
    ),
    turned("model.min_snr_gamma@models/sdxl.py:375", MIN_SNR, min_snr),
    turned("model.debiased_estimation_loss@models/sdxl.py:376", "loss.weighting", weighting("debiased")),
    turned(
        "model.timestep_sample_method@models/flux.py:343",
        _SAMPLED,
        own.levels,
        absent="logit_normal",
        families=own.FLOW,
    ),
    never("model.timestep_sample_method", "SDXL's noise levels are even there, too"),
    *part_of(
        "model.flux_shift@models/flux.py:364 model.shift@models/flux.py:362 model.sigmoid_scale@models/flux.py:358"
    ),
    turned("model.guidance@113", "loss.guidance_scale", to_float, families=["flux"]),
    never(
        "model.bypass_guidance_embedding@models/flux.py:189",
        "Flux's guidance is always an input; loss.guidance_scale = 1 is near it",
    ),
    turned("(text encoders)", TRAINED, own.encoders, absent="trained", families=["sdxl"]),
    *part_of("model.text_encoder_1_lr@models/sdxl.py:617 model.text_encoder_2_lr@models/sdxl.py:618"),
    turned("model.unet_lr@models/sdxl.py:616", "optimizer.lr", to_float),
    *(
        never(f"model.{name}", "[[lora.rules]] gives layers a rate of their own; 0 freezes them")
        for name in (
            *(f"{part}_lr@models/cosmos_predict2.py:481" for part in ("self_attn", "cross_attn", "mlp", "mod")),
        )
    ),
    turned("adapter.type@117", "lora.kind", own.kind),
    turned("adapter.rank@122", ("lora.rank", "lora.alpha", "lora.full_matrix"), own.rank),
    turned("adapter.decompose_factor@130", "lora.factor", lambda v, s: v if v > 0 else NOTHING),
    turned("adapter.dropout@128", "lora.dropout", unless_off),
    turned("adapter.rank_dropout@131", "lora.rank_dropout", unless_off),
    turned("adapter.init_from_existing@534", "lora.from", unless_off),
    never("adapter.exclude_modules@models/base.py:283", "lora.targets takes globs; write them by hand"),
    *needless("adapters are always fp32", "adapter.dtype@107"),
    never("adapter.fuse_adapters@models/flux.py:197", "merge them into the base with `flame-train merge`"),
    turned("(layers)", "lora.targets", own.targets, absent="all"),
    turned("optimizer.type@666", "optimizer.name", optimizer),
    turned("optimizer.lr@745", "optimizer.lr", to_float),
    never("optimizer.gradient_release@422", "an update for each micro-batch; here one for the whole batch"),
    never("optimizer.beta2_half_life@658", "optimizer.betas has the decay itself: 0.5 ** (batch size / half-life)"),
    *optimizer_keys("optimizer."),
    usual_of_library("optimizer.type", "optimizer.", {"adamw_optimi": OPTIMI}),
    turned("force_constant_lr@873", ("optimizer.lr", "schedule.name"), own.constant),
    turned("lr_scheduler@849", ("schedule.name", "schedule.min_lr"), own.scheduled, absent="constant"),
    turned("warmup_steps@858", "schedule.warmup_steps", unless_off),
    turned("epochs@853", "train.epochs", to_number),
    turned("max_steps@961", "train.steps", unless_off),
    turned("image_micro_batch_size_per_gpu@408", "data.batch_size", own.batch),
    turned("micro_batch_size_per_gpu@396", "data.batch_size", own.text_batch),
    turned("gradient_accumulation_steps@425", "gradient.accumulation", to_number),
    turned("gradient_clipping@427", "gradient.clip_norm", to_float),
    turned(
        "activation_checkpointing@587",
        "gradient.checkpointing",
        lambda v, s: NOTHING if not v else ("offload" if v == "unsloth" else "full"),
    ),
    turned(
        "pseudo_huber_c",
        ("loss.kind", "loss.huber_c", "loss.huber_schedule"),
        lambda v, s: {"loss.kind": "huber", "loss.huber_c": float(v)},
    ),
    turned("save_dtype@103", "output.precision", number_format),
    same("output_dir@547", "output.dir"),
    turned(
        "(output format)",
        "output.format",
        lambda v, s: "kohya" if s.family == "sdxl" else "diffusers",
        absent="its own",
    ),
    turned("save_every_n_epochs@utils/saver.py:136", "checkpoint.every_epochs", unless_off),
    turned("save_every_n_steps@utils/saver.py:165", "checkpoint.every", unless_off),
    turned("save_every_n_examples@643", "checkpoint.every", own.examples),
    turned("checkpoint_every_n_epochs@utils/saver.py:24", "checkpoint.every_epochs", unless_off),
    Row("checkpoint_every_n_minutes", (), own.minutes, at="utils/saver.py:39"),
    Row("pipeline_stages", (), own.one_stage, at="605"),
    swapped("blocks_to_swap@576", "activation_checkpointing"),
    *part_of("eval_datasets@437"),
    turned("eval_every_n_epochs@139", "validation.every_epochs", own.evaluated),
    turned("eval_every_n_steps@138", "validation.every", own.evaluated),
    turned("eval_every_n_examples@646", "validation.every", lambda v, s: own.evaluated(own.examples(v, s), s)),
    turned("uncond_fraction@288", "data.caption_dropout", unless_off),
    never("resume_from_checkpoint@303", "train.continue_from names the run to continue"),
    turned(
        "monitoring.enable_wandb@561",
        "output.wandb",
        lambda v, s: s.get("monitoring.wandb_tracker_name", NOTHING) if v else NOTHING,
    ),
    *part_of("monitoring.wandb_tracker_name@564"),
    *needless(
        "validation.timesteps and the batch size of training stand for it",
        "eval_micro_batch_size_per_gpu@402 eval_image_micro_batch_size_per_gpu@414 "
        "eval_gradient_accumulation_steps@137 eval_before_first_step@141 disable_block_swap_for_eval@907",
    ),
    *needless(
        _SPEED,
        "monitoring.*@588 reentrant_activation_checkpointing@99 partition_method@606 partition_split@607 "
        "caching_batch_size@430 map_num_proc@289 compile@142 steps_per_print@428 logging_steps@135 x_axis_examples@143 "
        "model.cache_text_embeddings@522 regenerate_cache@307",
    ),
    *needless(
        "the checkpoint says which family it is of, and of videos there are none here",
        "model.type@310 video_clip_mode@models/base.py:59",
    ),
]

_SET_ROWS: Final = [
    same("path@utils/dataset.py:477", "set.path"),
    turned("num_repeats@utils/dataset.py:735", ("set.repeats", "set.weight"), own.repeats),
    turned("resolutions@utils/dataset.py:882", ("set.resolution", "set.resolutions"), own.resolutions),
    turned("enable_ar_bucket@utils/dataset.py:732", (), own.without_buckets, absent=False),
    *needless(
        "buckets follow from the images' shapes",
        "min_ar@utils/dataset.py:502 max_ar@utils/dataset.py:503 num_ar_buckets@utils/dataset.py:504 "
        "frame_buckets@utils/dataset.py:508",
    ),
    never("ar_buckets@utils/dataset.py:499", "buckets follow from the images' shapes and data.bucket_step"),
    never("size_buckets@utils/dataset.py:460", "buckets follow from the images' shapes and data.bucket_step"),
    turned("control_path@utils/dataset.py:479", "set.control", unless_off),
    turned("mask_path@utils/dataset.py:478", ("set.masks", "set.mask_folder"), own.masks),
    never("default_mask_file@utils/dataset.py:481", "an image without a mask counts everywhere; write it one"),
    turned("cache_shuffle_num@utils/dataset.py:473", ("set.captions.shuffle", "set.captions.variants"), own.shuffled),
    turned("shuffle_tags@utils/dataset.py:761", ("set.captions.shuffle", "set.captions.variants"), own.shuffled_once),
    turned("cache_shuffle_delimiter@utils/dataset.py:476", "set.captions.separator", unless_off),
    turned("caption_prefix@utils/dataset.py:734", "set.captions.prefix", unless_off),
    turned("validation", "set.validation", switched(True)),
    turned("skip_empty_caption@utils/dataset.py:484", (), own.uncaptioned),
    never("online_captions@utils/dataset.py:515", "captions stand in text files or metadata.jsonl here"),
    never("subsample_ratio@utils/dataset.py:985", "train.steps ends an epoch early; repeats and weight choose images"),
    *needless("the order of images is always shuffled", "shuffle_metadata@utils/dataset.py:736"),
]

PROGRAM: Final = Program(
    "diffusion-pipe",
    own.is_mine,
    own.read,
    _ROWS,
    _SET_ROWS,
    "https://github.com/tdrussell/diffusion-pipe/blob/8f83dbf/train.py",
)
