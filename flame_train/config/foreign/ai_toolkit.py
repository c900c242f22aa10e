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
    hub_file,
    min_snr,
    number_format,
    only_with,
    optimizer,
    optimizer_keys,
    sampler,
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
_SPEED: Final = "it changes how fast a run is, where it computes and what it shows"
_VIDEO: Final = "it is about videos and models in stages, of which there are none here"
_OWN: Final = "ai-toolkit's own; a run here is without it"

_ROWS: Final = [
    turned(
        "training_folder@jobs/process/BaseTrainProcess.py:43",
        "output.dir",
        lambda v, s: f"{v}/{s.get('name')}" if s.get("name") else v,
    ),
    turned("name@jobs/process/BaseTrainProcess.py:45", "output.name", unless_off),
    turned("trigger_word@jobs/process/BaseSDTrainProcess.py:135", ("captions.trigger", "output.trigger"), own.trigger),
    turned("network.type@171", "lora.kind", own.kind, absent="lora"),
    *(turned(f"network.{name}", "lora.rank", to_number) for name in ("rank@172", "linear@173")),
    turned("(network.linear)", "lora.rank", to_number, absent=4),
    turned("network.linear_alpha@185", "lora.alpha", own.alpha, absent=1.0),
    turned("network.alpha@184", "lora.alpha", own.alpha),
    turned("network.conv@183", "lora.conv_rank", lambda v, s: v if s.family == "sdxl" and v else NOTHING),
    turned("network.conv_alpha@186", "lora.conv_alpha", lambda v, s: float(v) if s.family == "sdxl" and v else NOTHING),
    turned("(layers)", "lora.targets", own.targets, absent="all"),
    turned("network.lokr_full_rank@204", "lora.full_matrix", own.lokr_full, absent=True),
    turned("network.lokr_factor@211", "lora.factor", lambda v, s: v if v and v > 0 else NOTHING),
    turned("network.dropout@187", "lora.dropout", unless_off),
    turned("network.pretrained_lora_path@223", "lora.from", hub_file),
    *(
        never(f"network.network_kwargs.{name}", "lora.targets takes globs; write them by hand")
        for name in ("only_if_contains@toolkit/lora_special.py:327", "ignore_if_contains@toolkit/lora_special.py:326")
    ),
    never("network.transformer_only@202", "lora.targets has layers of the blocks; globs name others", True),
    turned("save.dtype@26", "output.precision", number_format, absent="float16"),
    turned("save.save_every@25", "checkpoint.every", own.updates, absent=1000),
    turned("save.max_step_saves_to_keep@27", "checkpoint.keep", to_number, absent=5),
    turned("save.save_format@29", "output.format", lambda v, s: "diffusers" if v == "diffusers" else NOTHING),
    *(
        never(f"save.{name}", "uploads to the hub are not here")
        for name in ("push_to_hub@31", "hf_repo_id@32", "hf_private@33")
    ),
    turned("train.batch_size@393", "data.batch_size", to_number),
    turned("train.steps@380", "train.steps", own.updates, absent=1000),
    turned("train.gradient_accumulation_steps@456", "gradient.accumulation", own.accumulated),
    turned("train.gradient_accumulation@460", "gradient.accumulation", lambda v, s: v if v and v > 1 else NOTHING),
    always("train.train_unet@400", "the denoiser is what is trained"),
    turned("train.train_text_encoder@401", TRAINED, own.encoders),
    never(
        "train.bypass_guidance_embedding@574", "Flux's guidance is always an input; loss.guidance_scale = 1 is near it"
    ),
    *part_of("train.text_encoder_lr@383"),
    turned("train.gradient_checkpointing@413", "gradient.checkpointing", switched("full"), absent=True),
    turned(
        "train.noise_scheduler@377",
        (),
        lambda v, s: (
            Lost('model.prediction = "flow" trains SDXL on flow matching, if the checkpoint is of that kind')
            if v == "flowmatch" and s.family == "sdxl"
            else NOTHING
        ),
    ),
    turned("train.optimizer@388", "optimizer.name", optimizer, absent="adamw"),
    turned("train.unet_lr@382", "optimizer.lr", own.rate),
    turned("train.lr@381", "optimizer.lr", own.rate, absent=1e-6),
    *optimizer_keys("train.optimizer_params."),
    turned("(eps)", "optimizer.eps", own.eps, absent="1e-6"),
    turned("train.lr_scheduler@390", ("schedule.name", "schedule.warmup_steps"), own.schedule, absent="constant"),
    *part_of(
        "train.lr_scheduler_params.num_warmup_steps@toolkit/scheduler.py:41 "
        "train.lr_scheduler_params.start_factor@jobs/process/BaseSDTrainProcess.py:2231 "
        "train.lr_scheduler_params.end_factor@jobs/process/BaseSDTrainProcess.py:2231"
    ),
    turned("train.lr_scheduler_params.eta_min@jobs/process/BaseSDTrainProcess.py:2231", "schedule.min_lr", to_float),
    never("train.lr_scheduler_params.*@391", "the schedule's own keys stand in [schedule]; write them by hand"),
    turned(
        "train.max_grad_norm@417",
        "gradient.clip_norm",
        lambda v, s: 0.0 if str(s.get("train.optimizer")).lower() == "adafactor" else float(v),
        absent=1.0,
    ),
    turned("train.ema_config.use_ema@545", "train.ema_decay", own.ema),
    *part_of("train.ema_config.ema_decay@828"),
    turned("train.dtype@395", "train.precision", number_format, absent="fp32"),
    *(turned(f"train.{name}", MIN_SNR, min_snr) for name in ("min_snr_gamma@405", "snr_gamma@406")),
    turned("train.noise_offset@410", "loss.offset_noise", unless_off),
    turned(
        "train.optimal_noise_pairing_samples@583",
        "loss.immiscible_noise",
        lambda v, s: NOTHING if not v or v == 1 else Changed(True, "pairs within a batch"),
    ),
    turned(
        "train.loss_type@524",
        "loss.kind",
        lambda v, s: {"mse": NOTHING, "mae": "l1"}.get(v, Lost("loss.kind has mse, l1, huber and smooth_l1")),
    ),
    turned("train.timestep_type@556", SAMPLED, own.levels, absent="sigmoid", families=own.FLOW),
    never("train.timestep_type@556", "SDXL's noise levels are even there, too", "sigmoid"),
    *(turned(f"train.{name}", SAMPLED, own.weighted) for name in ("linear_timesteps@558", "linear_timesteps2@559")),
    never("train.num_train_timesteps@441", "there are 1000 here", 1000),
    turned("train.min_denoising_steps@391", "loss.max_timestep", own.span("min")),
    turned("train.max_denoising_steps@392", "loss.min_timestep", own.span("max")),
    turned("train.prompt_dropout_prob@446", "data.caption_dropout", unless_off),
    never(
        "train.unload_text_encoder@564",
        "each image has the trigger word as its caption there; here captions are read: remove their files and set "
        "data.caption to have the same",
    ),
    *needless(
        _SPEED,
        "train.skip_first_sample@411 train.force_first_sample@412 train.xformers@396 train.sdp@397 "
        "train.attention_backend@399 train.cache_text_embeddings@566 device@jobs/process/BaseSDTrainProcess.py:105 "
        "performance_log_every@jobs/process/BaseProcess.py:24 "
        "sqlite_db_path@extensions_built_in/sd_trainer/DiffusionTrainer.py:20 "
        "log_dir@jobs/process/BaseTrainProcess.py:48 "
        "logging.log_every@37 logging.verbose@38 logging.use_ui_logger@40 "
        "logging.run_name@42 model.low_vram@689 model.compile@746 model.block_compile@750 "
        "model.compile_mode@751 model.compile_fullgraph@752 model.compile_dynamic@753 model.cache_size_limit@754 "
        "sample.format@93 network.old_lokr_format@214",
    ),
    turned(
        "logging.use_wandb@39",
        "output.wandb",
        lambda v, s: NOTHING if is_off(v) else s.get("logging.project_name", "ai-toolkit"),
    ),
    *part_of("logging.project_name@41"),
    *needless(
        _VIDEO,
        "train.switch_boundary_every@606 network.split_multistage_loras@217 sample.fps@99 sample.num_frames@98 "
        "train.audio_loss_multiplier@611",
    ),
    turned(
        "train.content_or_style@378",
        (),
        own.content_or_style,
        say="not here: noise levels are drawn by loss.timestep_sampling",
    ),
    *needless("ai-toolkit reads content_or_style in its place", "train.content_or_style_reg@379"),
    *part_of("train.reg_weight@440"),
    turned(f"{_DIFFERENTIAL}@493", _KEPT, own.kept("class", _DIFFERENTIAL)),
    turned(f"{_BLANK}@499", _KEPT, own.kept("blank", _BLANK)),
    *part_of(f"{_DIFFERENTIAL}_multiplier@491 {_DIFFERENTIAL}_class@493 {_BLANK}_multiplier@497"),
    *(
        never(f"train.{name}", "preservation.kind has class, blank and slider")
        for name in ("inverted_mask_prior@486", "do_differential_guidance@602", "do_guidance_loss@590")
    ),
    *(
        turned(f"train.{name}", (), only_with(f"train.{switch}"))
        for name, switch in (
            ("inverted_mask_prior_multiplier@487", "inverted_mask_prior"),
            ("differential_guidance_scale@603", "do_differential_guidance"),
            ("guidance_loss_target@591", "do_guidance_loss"),
            ("guidance_loss_schedule@597", "do_guidance_loss"),
            ("unconditional_prompt@598", "do_guidance_loss"),
            ("ema_config.*@542", "ema_config.use_ema"),
            ("batch_noise_correction_scale@428", "do_batch_noise_correction"),
            ("signal_amplification_strength@430", "do_signal_amplification"),
            ("signal_correction_noise_scale@432", "do_signal_correction_noise"),
            ("correct_pred_norm_multiplier@522", "correct_pred_norm"),
            ("target_norm_std_value@555", "target_norm_std"),
            ("paramiter_swapping_factor@570", "do_paramiter_swapping"),
            ("latent_feature_loss_weight@576", "latent_feature_extractor_path"),
            ("merge_network_on_save_strength@416", "merge_network_on_save"),
        )
    ),
    turned("model.arch@706", "model.kontext", lambda v, s: True if v == "flux_kontext" else NOTHING),
    turned("model.name_or_path@628", "model.checkpoint", checkpoint),
    turned("model.vae_path@646", "model.vae", hub_file),
    turned("model.attn_masking@690", "text_encoders.t5_padding", switched("zeros"), families=["flux"]),
    never("model.attn_masking@690", "ai-toolkit takes it for Flux alone"),
    turned("model.is_v_pred@644", "model.prediction", lambda v, s: "v" if v and s.family == "sdxl" else NOTHING),
    turned("model.quantize@685", "model.quantize", own.quantized),
    *part_of("model.qtype@687"),
    turned(
        "(model.quantize_te)",
        "text_encoders.precision",
        lambda v, s: own.quantized_text(s.get("model.quantize_te", s.get("model.quantize", False)), s),
        absent="as the model",
    ),
    *part_of("model.quantize_te@686 model.qtype_te@688"),
    turned("model.assistant_lora_path@652", "model.training_adapter", hub_file),
    never(
        "model.lora_path@650",
        "lora.from begins with a LoRA and trains it; merge this one into the base with `flame-train merge`",
    ),
    turned(
        "model.layer_offloading@713",
        ("model.offload", "gradient.checkpointing"),
        own.offloaded,
        say=STREAMED,
    ),
    *part_of("model.layer_offloading_transformer_percent@730"),
    turned("model.layer_offloading_text_encoder_percent@731", (), own.text_offloaded),
    *needless("the checkpoint says which family it is of", "model.is_*@631"),
    *needless("the type of [train] stands in its place", "model.dtype@jobs/process/BaseSDTrainProcess.py:117"),
    turned("sample.sample_every@82", "sample.every", own.every, absent=100),
    *part_of("train.disable_sampling@560"),
    never("sample.sample_start_step@83", "grids begin with the first step of sample.every"),
    turned("sample.sampler@81", "sample.sampler", sampler),
    same("sample.width@84", "sample.width"),
    same("sample.height@85", "sample.height"),
    turned("sample.samples@106", "sample.prompts", own.prompts),
    turned("sample.prompts@104", "sample.prompts", own.prompts),
    turned("sample.neg@86", "sample.negative", own.negative),
    turned("sample.seed@87", "sample.seed", own.seed),
    Row("sample.walk_seed", (), own.walk, at="86"),
    turned("sample.guidance_scale@89", "sample.guidance_scale", to_float),
    turned("sample.sample_steps@90", "sample.steps", to_number),
    never("sample.network_multiplier@91", "--am in a prompt is the strength of the LoRA", 1),
    *needless("its model has no such part here", "sample.adapter_conditioning_scale@94 sample.refiner_start_at@95"),
    *(
        never(f"{name}", _OWN, usual)
        for name, usual in (
            ("train.noise_multiplier@422", 1.0),
            ("train.target_noise_multiplier@423", 1.0),
            ("train.img_multiplier@434", 1.0),
            ("train.noisy_latent_multiplier@435", 1.0),
            ("train.latent_multiplier@436", 1.0),
            ("train.max_negative_prompts@438", 1),
            ("train.cfg_scale@513", 1.0),
            ("train.max_cfg_scale@514", 1.0),
            ("train.pred_scaler@535", 1.0),
            ("model.use_text_encoder_1@660", True),
            ("model.use_text_encoder_2@661", True),
        )
    ),
    *(
        never(pattern, _OWN)
        for pattern in ("train.*", "model.*", "network.*", "sample.*", "adapter.*", "slider.*", "embedding.*", "save.*")
    ),
]

_SET_ROWS: Final = [
    turned("shuffle_tokens@955", "set.captions.shuffle", switched(True)),
    turned("keep_tokens@957", "set.captions.keep_tokens", unless_off),
    turned("token_dropout_rate@954", "set.captions.tag_dropout", unless_off),
    turned("trigger_word@927", "set.captions.trigger", unless_off),
    turned("flip_x@958", "set.flip", switched(True)),
    never("flip_y@959", "images are mirrored left to right alone"),
    *(
        never(name, "data.random_crop, brightness, contrast, saturation and hue are what there is")
        for name in ("augmentations@1018", "augments@960", "random_scale@945")
    ),
    turned("random_crop@946", "set.random_crop", switched(True)),
    turned("alpha_mask@991", "set.masks", switched("alpha")),
    turned(
        "mask_path@992",
        ("set.masks", "set.mask_folder"),
        lambda v, s: NOTHING if is_off(v) else {"set.masks": "files", "set.mask_folder": v},
    ),
    turned("mask_min_value@997", "set.mask_weight", unless_off),
    never("invert_mask@996", "white is where an image counts"),
    turned("is_reg@951", ("set.regularization", "set.regularization_weight"), own.regularization),
    turned(
        "prior_reg@952",
        ("set.regularization", "set.regularization_target"),
        lambda v, s: NOTHING if is_off(v) else {"set.regularization": True, "set.regularization_target": "base"},
    ),
    turned("control_path@961", "set.control", unless_off),
    same("folder_path@921", "set.path"),
    same("dataset_path@923", "set.path"),
    turned("caption_ext@941", "set.caption_extension", ending),
    turned("caption_type@1029", "set.caption_extension", ending),
    turned("caption_dropout_rate@956", "set.caption_dropout", unless_off),
    turned("resolution@947", ("set.resolution", "set.resolutions"), own.resolutions, absent=512),
    turned("num_repeats@1002", "set.repeats", to_number),
    turned("batch_size@918", "set.batch_size", unless_off),
    turned("default_caption@925", "set.caption", unless_off),
    *(
        always(name, "latents and captions are encoded once, on disk")
        for name in ("cache_latents@1004", "cache_latents_to_disk@1006", "cache_text_embeddings@1011")
    ),
    always("buckets@949", "images go into buckets of their shape"),
    never("bucket_tolerance@950", "data.bucket_step has the family's own step", 64),
    *needless(
        _SPEED, "num_workers@1044 prefetch_factor@1045 cache_latents_num_workers@1047 fast_image_size@1087 debug@1077"
    ),
    never("num_frames@1056", "videos are not here", 1),
    *needless(_VIDEO, "shrink_video_to_frames@1059 do_i2v@1089 fps@1064 do_audio@1090 auto_frame_count@1069"),
    never("controls@1080", "control images lie in folders, which data.control names"),
    *(
        never(name, _OWN, usual)
        for name, usual in (
            ("type@919", "image"),
            ("network_weight@953", 1.0),
            ("scale@948", 1.0),
            ("loss_multiplier@1042", 1.0),
        )
    ),
    *(
        never(name, _OWN)
        for name in (
            "random_triggers@932",
            "unconditional_path@994",
            "inpaint_path@988",
            "use_short_captions@1001",
            "replacements@1041",
            "square_crop@1049",
            "standardize_images@1014",
            "extra_values@1048",
            "clip_image_path@1036",
            "control_from_same_folder@963",
        )
    ),
]

PROGRAM: Final = Program(
    "ai-toolkit",
    own.is_mine,
    own.read,
    _ROWS,
    _SET_ROWS,
    "https://github.com/ostris/ai-toolkit/blob/27a03a9/toolkit/config_modules.py",
)
