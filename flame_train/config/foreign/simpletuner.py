"""SimpleTuner's config in JSON, with the data backends and the LyCORIS config that it names."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from . import simpletuner_values as own
from .conversions import (
    MIN_SNR,
    SAMPLED,
    WARMUP,
    checkpoint,
    min_snr,
    number,
    number_format,
    optimizer,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
    usual_of_library,
)
from .table import (
    NOTHING,
    Program,
    needless,
    never,
    part_of,
    turned,
)

_ADAM: Final = MappingProxyType({"eps": 1e-6})
_USUAL: Final = MappingProxyType(
    {
        **dict.fromkeys(("adamw_bf16", "ao-adamw8bit", "bnb-adamw", "bnb-adamw8bit", "bnb-adamw8bit-paged"), _ADAM),
        "optimi-adamw": MappingProxyType({"betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.0}),
        "prodigy": MappingProxyType({"betas": [0.9, 0.99]}),
    }
)
"""What its optimizers have (optimizer_param.py:191, 205, 315, 580, 728) that is another here."""


_ROWS: Final = [
    turned("pretrained_model_name_or_path@model.py:122", "model.checkpoint", own.base_model, absent=""),
    turned("pretrained_vae_model_name_or_path@model.py:329", "model.vae", checkpoint),
    turned("base_model_precision@model.py:445", "model.quantize", own.quantized),
    never("base_model_default_dtype@model.py:1236", "the base model has train.precision"),
    turned("text_encoder_3_precision", "text_encoders.precision", own.quantized),
    turned("prediction_type@model.py:302", "model.prediction", own.prediction),
    turned("mixed_precision@advanced.py:682", "train.precision", number_format, absent="bf16"),
    turned("lora_type@lora.py:63", "lora.kind", own.kind, absent="standard"),
    turned(
        "lycoris.linear_dim@helpers/configuration/cmd_args.py:1184", ("lora.rank", "lora.full_matrix"), own.lycoris_rank
    ),
    turned("lycoris.linear_alpha@helpers/configuration/cmd_args.py:1186", "lora.alpha", to_float),
    turned("lycoris.factor", "lora.factor", lambda v, s: v if s.get("lycoris.algo") == "lokr" and v > 0 else NOTHING),
    *part_of("lycoris.algo@helpers/configuration/cmd_args.py:1180 use_dora@lora.py:451"),
    *needless(
        "the same result here",
        "lycoris.multiplier@helpers/configuration/cmd_args.py:1181 "
        "lycoris.bypass_mode@helpers/training/trainer.py:3435",
    ),
    turned("lycoris.full_matrix", "lora.full_matrix", switched(True)),
    never("lycoris.*", "layers and their settings are lora.targets and [[lora.rules]]; write them by hand"),
    turned("lora_rank@lora.py:18", "lora.rank", own.of_standard(to_number)),
    turned("lora_alpha@lora.py:41", "lora.alpha", own.of_standard(own.alpha)),
    turned("(lora_alpha)", "lora.alpha", lambda v, s: float(s.get("lora_rank", 16)), absent="the rank"),
    turned("lora_dropout@lora.py:130", "lora.dropout", unless_off),
    turned("flux_lora_target", "lora.targets", own.targets, absent="all", families=["flux"]),
    turned("(lora targets)", "lora.targets", own.targets, absent="all", families=own.OTHERS),
    turned("init_lora@lora.py:235", "lora.from", unless_off),
    turned("learning_rate@training.py:83", "optimizer.lr", to_float, absent=4e-7),
    turned("optimizer@optimizer.py:80", "optimizer.name", optimizer),
    usual_of_library("optimizer", "", _USUAL),
    never("optimizer_config@optimizer.py:246", "an optimizer's own keys stand in [optimizer]; write them by hand"),
    turned(
        "lr_scheduler@training.py:141",
        ("schedule.name", "schedule.cycles", "schedule.power"),
        own.scheduled,
        absent="constant_with_warmup",
    ),
    turned("lr_warmup_steps@training.py:180", WARMUP, own.warmed),
    turned("lr_num_cycles@training.py:760", "schedule.cycles", own.cycles),
    *part_of("lr_power@training.py:781"),
    turned("lr_end@advanced.py:915", "schedule.min_lr", own.least, absent=4e-7),
    never("lr_scale*@advanced.py:932", "optimizer.lr is the rate itself; multiply it by hand"),
    turned("max_train_steps@training.py:42", "train.steps", own.steps),
    turned("num_train_epochs@training.py:20", "train.epochs", own.epochs),
    turned("train_batch_size@training.py:61", "data.batch_size", to_number, absent=4),
    turned("gradient_accumulation_steps@memory.py:18", "gradient.accumulation", to_number),
    turned("gradient_checkpointing@model.py:484", "gradient.checkpointing", switched("full")),
    never("gradient_checkpointing_interval@model.py:484", "gradient.checkpoint_blocks takes globs over blocks"),
    turned("max_grad_norm@optimizer.py:228", ("gradient.clip_norm", "gradient.clip_value"), own.clip, absent=2.0),
    *part_of("grad_clip_method@optimizer.py:265"),
    turned("seed@logging_fields.py:324", "train.seed", lambda v, s: NOTHING if v in (None, -1) else v),
    turned("use_ema@training.py:820", "train.ema_decay", own.ema),
    *part_of("ema_decay@training.py:922 ema_update_interval@training.py:882"),
    turned("loss_type@loss.py:20", "loss.kind", own.loss),
    turned(
        "snr_gamma@loss.py:84",
        MIN_SNR,
        lambda v, s: (
            min_snr(v, s)
            if not s.get("use_soft_min_snr")
            else {"loss.weighting": "soft_min_snr", "loss.snr_gamma": float(v)}
        ),
    ),
    *part_of("use_soft_min_snr@training.py:800"),
    turned(
        "flow_schedule_shift@advanced.py:508",
        (*SAMPLED, "loss.beta_a", "loss.beta_b"),
        own.levels,
        absent=3,
        families=own.FLOW,
    ),
    *part_of(
        "flow_schedule_shift@advanced.py:508 flow_schedule_auto_shift@advanced.py:526 "
        "flow_use_beta_schedule@advanced.py:434 flow_use_uniform_schedule@advanced.py:417 "
        "flow_sigmoid_scale@advanced.py:399 flow_beta_schedule_alpha@advanced.py:451 "
        "flow_beta_schedule_beta@advanced.py:469",
    ),
    turned("flux_guidance_mode", "loss.guidance_scale", own.guidance, absent="constant", families=["flux"]),
    *part_of("flux_guidance_value flux_guidance_min flux_guidance_max"),
    turned("offset_noise@logging_fields.py:517", "loss.offset_noise", own.offset, families=["sdxl"]),
    never("offset_noise@logging_fields.py:517", "models of flow matching have none there, too"),
    *part_of("noise_offset@advanced.py:834 noise_offset_probability@advanced.py:855"),
    turned("input_perturbation@advanced.py:876", "loss.input_perturbation", unless_off),
    turned("rescale_betas_zero_snr@model.py:889", "loss.zero_terminal_snr", switched(True)),
    turned("caption_dropout_probability@advanced.py:1183", "data.caption_dropout", unless_off),
    turned(
        "tokenizer_max_length@data.py:559", "text_encoders.t5_tokens", unless_off, families=["sd3", "flux", "chroma"]
    ),
    turned("resolution@data.py:20", "data.resolution", own.resolution),
    turned("aspect_bucket_alignment@advanced.py:2270", "data.bucket_step", to_number),
    turned("output_dir@model.py:141", "output.dir", unless_off),
    turned(
        "lora_format@lora.py:381",
        "output.format",
        own.of_standard(lambda v, s: "kohya" if v == "comfyui" else "diffusers"),
        absent="diffusers",
    ),
    turned("vae_dtype@model.py:346", "model.vae_precision", own.vae_precision),
    turned(
        "report_to@logging_fields.py:18",
        ("output.tensorboard", "output.wandb"),
        own.tracked,
    ),
    *part_of("tracker_project_name@logging_fields.py:224"),
    *(
        turned(name, "checkpoint.every", unless_off)
        for name in (
            "checkpoint_step_interval@logging_fields.py:72",
            "checkpointing_steps@helpers/training/trainer.py:952",
        )
    ),
    turned("checkpoint_epoch_interval@logging_fields.py:92", "checkpoint.every_epochs", unless_off),
    turned("checkpoints_total_limit@training.py:198", "checkpoint.keep", to_number, absent=5),
    *(
        turned(name, "sample.every", unless_off)
        for name in ("validation_step_interval@validation.py:18", "validation_steps")
    ),
    turned("validation_epoch_interval@validation.py:37", "sample.every_epochs", unless_off),
    turned("validation_prompt@validation.py:152", "sample.prompts", lambda v, s: [v] if v else NOTHING),
    turned(
        "validation_negative_prompt@validation.py:549",
        "sample.negative",
        own.negative,
    ),
    turned("validation_guidance@validation.py:410", "sample.guidance_scale", to_float),
    turned("validation_num_inference_steps@validation.py:431", "sample.steps", to_number),
    turned("validation_resolution@validation.py:911", ("sample.width", "sample.height"), own.sizes),
    turned("validation_seed@validation.py:585", "sample.seed", lambda v, s: NOTHING if v is None else v),
    never("user_prompt_library@validation.py:660", "prompts stand in sample.prompts"),
    never("validation_prompt_library@validation.py:643", "prompts stand in sample.prompts"),
    never("validation_guidance_rescale@validation.py:714", "guidance is not rescaled"),
    never("validation_guidance_skip_layers@validation.py:754", "sampling without layers is not here"),
    never("tread_config@model.py:965", "all tokens go through all blocks"),
    never("masked_loss_probability@loss.py:102", "data.masks has masks for all images of a folder"),
    swapped("musubi_blocks_to_swap@training.py:651", "gradient_checkpointing"),
    never("caption_strategy@data.py:87", "captions stand in text files or metadata.jsonl here"),
    *(
        never(name, "uploads to the hub are not here")
        for name in ("push_to_hub@publishing.py:20", "push_checkpoints_to_hub@publishing.py:92")
    ),
    *(
        never(pattern, "not in this version")
        for pattern in (
            "ramtorch*@training.py:345",
            "crepa_*@loss.py:398",
            "sla_*@advanced.py:754",
            "*_distillation*",
            "distillation_*@logging_fields.py:402",
            "eval_*@validation.py:280",
            "scheduled_sampling_*@advanced.py:74",
        )
    ),
    *(
        never(name, why, usual)
        for name, why, usual in (
            ("aspect_bucket_rounding@model.py:422", "buckets follow from the images' shapes and data.bucket_step", 2),
            ("data_backend_sampling@advanced.py:1509", "sets are drawn by their repeats and weight", "uniform"),
            ("validation_*_strength", "--am in a prompt is the strength of the LoRA", 1.0),
            ("num_validation_images@validation.py:189", "one image for each prompt", 1),
            (
                "resume_from_checkpoint@model.py:278",
                "the same command continues its run; train.continue_from names another",
                "latest",
            ),
        )
    ),
    *(
        never(name, why)
        for name, why in (
            ("strict_epoch_limit", "epochs are whole here"),
            ("sdnq_*", "model.quantize has its own ways"),
            ("quantize_activations", "model.arithmetic says in which numbers products are"),
            ("controlnet@model.py:105", "a ControlNet is not trained here"),
            (
                "minimum_image_size@advanced.py:2295",
                "data.on_bad_image is about broken images; take small ones out by hand",
            ),
            ("delete_*@advanced.py:1204", 'data.on_bad_image = "skip" leaves broken images out, and none is deleted'),
            ("validation_noise_scheduler@validation.py:865", "sample.sampler says which"),
            ("validation_num_video_frames@validation.py:893", "videos are not here"),
        )
    ),
    *needless("the checkpoint says which family it is of", "model_family@model.py:61 model_type@model.py:196"),
    turned("model_flavour@model.py:84", "model.kontext", lambda v, s: True if v == "kontext" else NOTHING),
    *part_of("resolution_type@data.py:42"),
    *needless(
        "what is kept in a run's folder stays there",
        "hub_model_id@publishing.py:127 tracker_*@logging_fields.py:185 logging_dir@logging_fields.py:265 "
        "metadata_update_interval@advanced.py:2347",
    ),
    *needless(
        "it changes how fast a run is, and what it shows",
        "attention_mechanism@advanced.py:736 cache_dir*@advanced.py:1330 compress_disk_cache@advanced.py:1438 "
        "dataloader_prefetch*@advanced.py:2216 disable_benchmark@validation.py:94 "
        "disable_bucket_pruning@advanced.py:1240 dynamo_*@advanced.py:2032 ema_device@training.py:839 "
        "ema_foreach_disable@training.py:902 fuse_qkv_projections@helpers/models/common.py:3662 "
        "gradient_checkpointing_backend@training.py:236 i_know_what_i_am_doing@advanced.py:18 "
        "image_processing_batch_size@advanced.py:1531 max_workers@advanced.py:2160 "
        "num_eval_images@validation.py:259 offload_*@logging_fields.py:497 override_dataset_config@advanced.py:1313 "
        "preserve_data_backend_cache@advanced.py:1296 quantize_via@model.py:578 "
        "skip_file_discovery@advanced.py:1491 text_encoder_batch_size@advanced.py:1587 "
        "torch_num_threads@advanced.py:2197 vae_batch_size@data.py:498 vae_cache_ondemand@model.py:369 "
        "validation_disable_unconditional@validation.py:736 validation_on_startup@validation.py:450 "
        "validation_torch_compile@validation.py:94 write_batch_size@advanced.py:1549",
    ),
]

_SET_ROWS: Final = [
    turned("instance_data_dir@helpers/data_backend/factory.py:629", "set.path", own.folder),
    turned("resolution@helpers/data_backend/factory.py:573", "set.resolution", own.resolution),
    turned("repeats@helpers/data_backend/factory.py:440", "set.repeats", lambda v, s: int(number(v or 0)) + 1),
    turned("probability@helpers/data_backend/factory.py:477", (), own.drawn),
    turned("control", "set.control", unless_off),
    turned("validation@helpers/data_backend/factory.py:1892", "set.validation", switched(True)),
    turned("instance_prompt@helpers/data_backend/factory.py:3506", "set.caption", unless_off),
    turned("type@helpers/data_backend/factory.py:213", (), own.not_local),
    turned("caption_strategy@helpers/data_backend/factory.py:620", (), own.strategy),
    turned("train_batch_size@helpers/data_backend/factory.py:328", "set.batch_size", to_number),
    turned("is_regularisation_data@helpers/data_backend/factory.py:3509", "set.regularization", switched(True)),
    turned("caption_shuffle.enable", "set.captions.shuffle", switched(True)),
    turned(
        "caption_shuffle.count@helpers/data_backend/factory.py:711",
        "set.captions.variants",
        lambda v, s: v if s.get("caption_shuffle.enable") else NOTHING,
    ),
    never("caption_shuffle.*", "captions.separator and keep_tokens say where tags begin"),
    turned("crop@helpers/data_backend/factory.py:491", "set.random_crop", own.cropped),
    *part_of("crop_aspect@helpers/data_backend/factory.py:532 crop_style@helpers/data_backend/factory.py:554"),
    never("crop_aspect_buckets@helpers/data_backend/factory.py:538", "images keep their shape; crop them beforehand"),
    never("only_instance_prompt@helpers/data_backend/factory.py:3519", "data.caption is for images without a caption"),
    never(
        "prepend_instance_prompt@helpers/data_backend/factory.py:3505",
        "captions.prefix is a text: write the prompt there",
    ),
    *(
        never(name, "images are all of the folder; take others out by hand")
        for name in (
            "minimum_image_size@helpers/data_backend/factory.py:614",
            "minimum_aspect_ratio@helpers/data_backend/factory.py:737",
            "maximum_aspect_ratio@helpers/data_backend/factory.py:738",
            "start_epoch@helpers/data_backend/factory.py:319",
            "start_step@helpers/data_backend/factory.py:320",
        )
    ),
    *(
        never(name, "images are scaled to the resolution alone")
        for name in (
            "maximum_image_size@helpers/data_backend/factory.py:614",
            "target_downsample_size@helpers/data_backend/factory.py:614",
        )
    ),
    *part_of("resolution_type@helpers/data_backend/factory.py:577"),
    never(
        "vae_cache_clear_each_epoch@helpers/data_backend/factory.py:465",
        "data.views says how many crops of an image are kept",
    ),
    *(
        never(name, "not in this version")
        for name in (
            "conditioning*@helpers/data_backend/factory.py:457",
            "timestep_sampling_offset@helpers/data_backend/factory.py:483",
            "disable_validation@helpers/data_backend/factory.py:565",
            "parquet@helpers/data_backend/factory.py:621",
            "csv*@helpers/data_backend/factory.py:213",
            "huggingface*@helpers/data_backend/factory.py:213",
        )
    ),
    *needless(
        "it tells sets of images from others; those that are off are left out",
        "id@helpers/data_backend/factory.py:299 dataset_type@helpers/data_backend/factory.py:197 "
        "disabled@helpers/data_backend/factory.py:1110 disable@helpers/data_backend/factory.py:1110",
    ),
    *needless(
        "it is about caches and how fast they are made",
        "cache_dir_vae@helpers/data_backend/factory.py:2056 cache_dir@helpers/data_backend/factory.py:518 "
        "metadata_backend@helpers/data_backend/factory.py:642 dataset_name@helpers/data_backend/factory.py:2095 "
        "text_embeds@helpers/data_backend/factory.py:1406 image_embeds@helpers/data_backend/factory.py:1407 "
        "skip_file_discovery@helpers/data_backend/factory.py:3198 "
        "preserve_data_backend_cache@helpers/data_backend/factory.py:2478 "
        "write_batch_size@helpers/data_backend/factory.py:2366 "
        "vae_cache_ondemand@helpers/data_backend/factory.py:63",
    ),
]

PROGRAM: Final = Program(
    "SimpleTuner",
    own.is_mine,
    own.read,
    _ROWS,
    _SET_ROWS,
    "https://github.com/bghira/SimpleTuner/blob/bc8e6ab/simpletuner, files without a folder in "
    "simpletuner_sdk/server/services/field_registry/sections",
)
