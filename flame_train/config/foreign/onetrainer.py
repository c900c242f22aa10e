"""OneTrainer's JSON: presets, and configs as its window saves them, with the concepts and samples in files beside."""

from __future__ import annotations

from typing import Final

from . import onetrainer_sets as sets
from . import onetrainer_values as own
from .conversions import (
    SAMPLED,
    STREAMED,
    WARMUP,
    checkpoint,
    number_format,
    one_of,
    only_with,
    optimizer,
    optimizer_keys,
    switched,
    to_float,
    to_number,
    unless_off,
)
from .encoders import TRAINED
from .table import (
    NOTHING,
    Lost,
    Program,
    always,
    is_off,
    needless,
    never,
    part_of,
    same,
    turned,
)

_DENOISERS: Final = (("unet", ("sdxl",)), ("transformer", own.TRANSFORMERS))
_TEXTS: Final = (
    ("text_encoder", ("zimage", "flux2", "krea2", "anima", "qwenimage1", "chroma")),
    ("text_encoder_2", ("flux",)),
    ("text_encoder_3", ("sd3",)),
)
"""The large text encoder of families; CLIPs are small."""
_TRAINED_PART: Final = ("train@301", "learning_rate@304", "stop_training_after@302", "stop_training_after_unit@303")
_TEXT_PARTS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")

_ROWS: Final = [
    *(turned(f"{part}.model_name@299", "model.checkpoint", checkpoint, families=those) for part, those in _DENOISERS),
    turned("base_model_name@1042", "model.checkpoint", checkpoint),
    turned("vae.model_name@299", "model.vae", unless_off),
    *(turned(f"{part}.weight_dtype@305", "model.quantize", own.weights, families=those) for part, those in _DENOISERS),
    turned("weight_dtype@305", "model.quantize", own.weights),
    turned("vae.weight_dtype@305", "model.vae_precision", own.vae_weights),
    *(
        turned(f"{part}.weight_dtype@305", "text_encoders.precision", own.text_weights, families=those)
        for part, those in _TEXTS
    ),
    turned("force_v_prediction@1099", "model.prediction", switched("v")),
    turned("force_epsilon_prediction@1100", "model.prediction", switched("epsilon")),
    turned("train_dtype@1074", "train.precision", number_format, absent="FLOAT_16"),
    turned("peft_type@1229", "lora.kind", own.kind, absent="LORA"),
    same("lora_rank@1231", "lora.rank"),
    turned("lora_alpha@1232", "lora.alpha", to_float, absent=1.0),
    turned("lora_model_name@1230", "lora.from", unless_off),
    turned(
        "lora_decompose_output_axis@1235",
        "lora.wd_on_output",
        lambda v, s: True if v and s.get("lora_decompose") else NOTHING,
    ),
    *part_of("lora_decompose@1233"),
    turned("lora_decompose_norm_epsilon@1234", (), own.norm_epsilon),
    never("lora_weight_dtype@1236", "adapters are always fp32", "FLOAT_32"),
    *(
        turned(theirs, f"lora.{ours}", lambda v, s: v if s.get("peft_type") == "LOKR" and v and v != -1 else NOTHING)
        for theirs, ours in (
            ("lokr_dim@1245", "rank"),
            ("lokr_decompose_both@1246", "decompose_both"),
            ("lokr_decompose_factor@1247", "factor"),
            ("lokr_full_matrix@1251", "full_matrix"),
        )
    ),
    *(never(name, "LoKr here is without it") for name in ("lokr_use_tucker@1248", "lokr_weight_decompose@1249")),
    *needless("LoKr computes the same, or it is about its DoRA", "lokr_vec_trick@1252 lokr_dora_on_output@1250"),
    never("oft_*@1240", "no such adapter here: OFT"),
    turned("layer_filter_preset@362", "lora.targets", own.targets, absent="full"),
    *part_of("layer_filter@361 layer_filter_regex@363"),
    *(turned(f"{part}.learning_rate@304", "optimizer.lr", own.own_rate, families=those) for part, those in _DENOISERS),
    turned("learning_rate@304", "optimizer.lr", own.rate, absent=3e-6),
    *part_of("learning_rate_scaler@1091"),
    turned("optimizer@150", "optimizer.name", optimizer),
    *(
        turned(f"optimizer.{name}", ("optimizer.betas", f"optimizer.{name}"), own.beta(name))
        for name in ("beta1", "beta2")
    ),
    *(row for row in optimizer_keys("optimizer.") if not row.key.startswith("optimizer.beta")),
    turned(
        "learning_rate_scheduler@1058",
        ("schedule.name", "schedule.cycles", "schedule.rex_d"),
        own.scheduled,
        absent="CONSTANT",
    ),
    turned("learning_rate_warmup_steps@1062", WARMUP, own.warmup, absent=200.0),
    *part_of("learning_rate_cycles@1063"),
    turned("learning_rate_min_factor@1064", "schedule.min_lr", own.least),
    never("custom_learning_rate_scheduler@1059", "no class path stands in a config"),
    turned("epochs@1065", "train.epochs", to_number, absent=100),
    turned("batch_size@1066", "data.batch_size", to_number),
    turned("gradient_accumulation_steps@1067", "gradient.accumulation", to_number),
    turned("clip_grad_norm@1092", "gradient.clip_norm", lambda v, s: 0.0 if v is None else float(v)),
    turned(
        "gradient_checkpointing@310",
        "gradient.checkpointing",
        one_of(
            {"ON": "full", "OFF": "off", "CPU_OFFLOADED": "offload", True: "full", False: "off"},
            "expected ON, OFF or CPU_OFFLOADED",
        ),
    ),
    turned("layer_offload_fraction@837", "model.offload", own.streamed, say=STREAMED),
    *(
        turned(f"{part}.activation_offloading@312", "gradient.checkpointing", switched("offload"), families=those)
        for part, those in _DENOISERS
    ),
    *(
        turned(
            f"{part}.offload_fraction@311", ("model.offload", "gradient.checkpointing"), own.offloaded, families=those
        )
        for part, those in _DENOISERS
    ),
    *(always(f"{part}.train@301", "the denoiser is what is trained") for part in ("unet", "transformer")),
    *(
        turned(
            f"{part}.gradient_checkpointing@310",
            "gradient.checkpointing",
            switched("full"),
            families=those,
            absent=True,
        )
        for part, those in _DENOISERS
    ),
    turned("ema@1068", "train.ema_decay", own.rounds),
    *part_of("ema_decay@1069 ema_update_step_interval@1070"),
    turned("resolution@1078", ("data.resolution", "data.resolutions"), own.resolutions, absent="512"),
    always("aspect_ratio_bucketing@1053", "images go into buckets of their shape"),
    always("latent_caching@1054", "latents and captions are encoded once, on disk"),
    turned("loss_weight_fn@1087", ("loss.weighting", "loss.snr_gamma", "loss.p2_gamma"), own.weighting),
    *part_of("loss_weight_strength@1088"),
    turned("mse_strength@1081", "loss.kind", own.losses),
    turned("mae_strength@1082", "loss.kind", own.losses),
    turned("huber_strength@1084", "loss.kind", own.losses),
    turned("log_cosh_strength@1083", "loss.kind", own.losses),
    *part_of("huber_delta@1085"),
    turned("timestep_distribution@1103", (*SAMPLED, "loss.mode_scale"), own.levels, absent="UNIFORM"),
    *part_of("noising_weight@1104 noising_bias@1105 timestep_shift@1106 dynamic_timestep_shifting@1107"),
    turned("min_noising_strength@1101", "loss.min_timestep", own.span("min")),
    turned("max_noising_strength@1102", "loss.max_timestep", own.span("max")),
    turned("offset_noise_weight@1095", "loss.offset_noise", unless_off),
    never("generalized_offset_noise@1096", "loss.offset_noise has one strength for all noise levels"),
    turned("perturbation_noise_weight@1097", "loss.input_perturbation", unless_off),
    turned("rescale_noise_scheduler_to_zero_terminal_snr@1098", "loss.zero_terminal_snr", switched(True)),
    turned("transformer.guidance_scale@309", "loss.guidance_scale", to_float, families=["flux"]),
    turned("transformer.attention_mask@308", "text_encoders.t5_padding", switched("zeros"), families=["flux"]),
    *needless("Flux alone has it", "*.guidance_scale@309 *.attention_mask@308"),
    turned("dropout_probability@306", "lora.dropout", unless_off),
    *(
        turned(f"{part}.dropout_probability@306", f"text_encoders.{ours}", unless_off, families=[f])
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
    *part_of(" ".join(f"{part}.{name}" for part in _TEXT_PARTS[:3] for name in _TRAINED_PART)),
    *(
        turned(
            f"{part}_layer_skip@{line}",
            (),
            lambda v, s: NOTHING if is_off(v) else Lost("always the layer that these models were trained with"),
        )
        for part, line in zip(_TEXT_PARTS, (1151, 1161, 1171, 1180), strict=True)
    ),
    turned(
        "text_encoder_2_sequence_length@1162",
        "text_encoders.t5_tokens",
        own.tokens(77, 154, 256, 512),
        families=["flux"],
    ),
    turned(
        "text_encoder_sequence_length@1152",
        "text_encoders.qwen3_tokens",
        own.tokens(128, 256, 512, 1024),
        families=["zimage", "flux2", "krea2", "anima", "qwenimage1"],
    ),
    turned(
        "text_encoder_sequence_length@1152",
        "text_encoders.t5_tokens",
        own.tokens(77, 154, 256, 512),
        families=["chroma"],
    ),
    *needless("this family has one length", "text_encoder_sequence_length@1152 text_encoder_2_sequence_length@1162"),
    turned("output_model_destination@1045", ("output.dir", "output.name"), own.file),
    turned("output_model_format@1044", "output.format", own.format),
    turned("output_dtype@1043", "output.precision", number_format, absent="FLOAT_32"),
    turned("tensorboard@1022", "output.tensorboard", switched(True)),
    *part_of("sample_after_unit@1262 save_every_unit@1277 backup_after_unit@1272"),
    turned(
        "sample_after@1261", ("sample.every", "sample.every_epochs"), own.interval("sample.every", "sample_after_unit")
    ),
    turned(
        "save_every@1276",
        ("checkpoint.every", "checkpoint.every_epochs"),
        own.interval("checkpoint.every", "save_every_unit"),
    ),
    turned(
        "backup_after@1271",
        ("checkpoint.every", "checkpoint.every_epochs"),
        own.interval("checkpoint.every", "backup_after_unit"),
    ),
    turned("rolling_backup_count@1274", "checkpoint.keep", lambda v, s: v if s.get("rolling_backup") else NOTHING),
    *part_of("rolling_backup@1273"),
    turned("samples@1260", "sample.prompts", sets.samples),
    turned("masked_training@1206", "data.masks", switched("files")),
    turned("unmasked_weight@1208", "data.mask_weight", sets.with_masks),
    turned("normalize_masked_area_loss@1209", "data.mask_normalize", sets.with_masks),
    never("masked_prior_preservation_weight@1210", "not taken over: see preservation.kind"),
    turned("unmasked_probability@1207", (), sets.unmasked),
    turned("validate_after@1027", ("validation.every", "validation.every_epochs"), own.validated),
    *part_of("validation@1026 validate_after_unit@1028"),
    never("quantization.layer_filter@361", "which layers are quantized is the family's own choice"),
    never("loss_scaler@1090", "a factor on the loss changes the step size; set optimizer.lr"),
    never("multi_gpu@1034", "a run is one process on one GPU"),
    *(
        never(name, why, usual)
        for name, why, usual in (
            ("only_cache@1077", "`flame-train cache` encodes alone", False),
            (
                "continue_last_backup@1029",
                "the same command continues its run; train.continue_from names another",
                False,
            ),
            ("*.include@300", "all parts of a model are there", True),
            ("sample_skip_first@1263", "grids begin with the first step of sample.every", 0),
            ("save_skip_first@1278", "checkpoints begin with the first step of checkpoint.every", 0),
            ("non_ema_sampling@1268", "images are drawn with the averaged weights", None),
        )
    ),
    *(
        never(name, "not in this version")
        for name in (
            "force_circular_padding@1047",
            "custom_conditioning_image@1211",
            "additional_embeddings@1222",
            "embedding_learning_rate@1219",
        )
    ),
    *needless(
        "quantized layers follow from the family; it is of a filter or an accuracy here",
        "quantization.layer_filter_preset@362 quantization.layer_filter_regex@363 quantization.svd_dtype@364 "
        "quantization.svd_rank@365 quantization.cache_dir@366",
    ),
    *needless(
        "the checkpoint says which family it is of; adapters are trained",
        "model_type@1015 training_method@1014",
    ),
    *needless(
        "it is of another model or of embeddings, of which there are none here",
        "frames@1079 vb_loss_strength@1086 embedding@1221 preserve_embedding_norm@1220 embedding_weight_dtype@1223 "
        "bundle_additional_embeddings@1237 *.train_embedding@307 prior@1123 unconditional_transformer@1138 "
        "effnet_encoder@1190 decoder@1195 decoder_text_encoder@1199 decoder_vqgan@1203 vae.*@1185 "
        "scheduler_params@1060",
    ),
    *needless(
        "it is of the denoiser or an encoder that this family lacks",
        "unet.*@1115 transformer.*@1131 text_encoder.*@1150 text_encoder_2.*@1160 text_encoder_3.*@1170 "
        "text_encoder_4.*@1179",
    ),
    *needless(
        "it changes how fast a run is, where it computes and what it shows",
        "optimizer_defaults@1256 secrets@1283 cloud@1226 tensorboard_*@1023 samples_to_tensorboard@1267 "
        "workspace_dir@1018 cache_dir@366 debug_mode@1016 debug_dir@1017 clear_cache_before_training@1055 "
        "dataloader_threads@1071 train_device@1072 temp_device@1073 fallback_train_dtype@1075 "
        "enable_autocast_cache@1076 attention_mechanism@1080 include_train_config@1031 prevent_overwrites@1030 "
        "async_*@838 fused_gradient_reduce@1037 gradient_reduce_precision@1036 device_indexes@1035 compile@253 "
        "huggingface_cache_dir@1020 offline_mode@1021 backup_before_save@1275 save_filename_prefix@1279 "
        "sample_image_format@1264 sample_video_format@1265 sample_audio_format@1266 "
        "__version@modules/util/config/BaseConfig.py:48",
    ),
]

_SET_ROWS: Final = [
    same("path@ConceptConfig.py:188", "set.path"),
    turned(
        "balancing@ConceptConfig.py:195",
        ("set.repeats", "set.weight"),
        lambda v, s: sets.as_set(sets.repeats(v, s)),
    ),
    turned(
        "type@ConceptConfig.py:191",
        ("set.validation", "set.regularization", "set.regularization_target"),
        sets.concept_type,
    ),
    turned("validation_concept", "set.validation", switched(True)),
    turned(
        "text.prompt_source@ConceptConfig.py:109",
        "set.caption",
        lambda v, s: (
            NOTHING
            if v == "sample"
            else Lost("captions from one file or from file names: write a text file for each image")
        ),
    ),
    turned(
        "image.enable_resolution_override@ConceptConfig.py:74",
        ("set.resolution", "set.resolutions"),
        sets.overridden,
    ),
    *part_of("image.resolution_override@ConceptConfig.py:75"),
    turned("image.enable_random_flip@ConceptConfig.py:51", "set.flip", switched(True)),
    never(
        "image.enable_fixed_flip@ConceptConfig.py:52",
        "images are mirrored at random, in half of their showings",
    ),
    *(
        turned(f"image.enable_random_{name}@ConceptConfig.py:{line}", f"set.{name}", sets.change(name))
        for name, line in (("brightness", 58), ("contrast", 62), ("saturation", 66), ("hue", 70))
    ),
    *(never(f"image.enable_{kind}_*@ConceptConfig.py:54", "not here") for kind in ("random", "fixed")),
    *(
        part_of(
            ""
            "image.random_brightness_max_strength@ConceptConfig.py:60 "
            "image.random_contrast_max_strength@ConceptConfig.py:64 "
            "image.random_saturation_max_strength@ConceptConfig.py:68 "
            "image.random_hue_max_strength@ConceptConfig.py:72"
        )
    ),
    turned("image.random_rotate_max_angle@ConceptConfig.py:56", (), only_with("image.enable_random_rotate")),
    turned("image.enable_crop_jitter@ConceptConfig.py:49", "set.random_crop", switched(True)),
    turned(
        "image_variations@ConceptConfig.py:193",
        "set.views",
        lambda v, s: v if s.get("image.enable_crop_jitter") else NOTHING,
    ),
    turned("text.enable_tag_shuffling@ConceptConfig.py:111", "set.captions.shuffle", switched(True)),
    turned(
        "text.keep_tags_count@ConceptConfig.py:113",
        "set.captions.keep_tokens",
        sets.tags(unless_off),
    ),
    turned("text_variations@ConceptConfig.py:194", "set.captions.variants", sets.tags(to_number)),
    turned("text.tag_delimiter@ConceptConfig.py:112", "set.captions.separator", unless_off),
    turned(
        "text.tag_dropout_enable@ConceptConfig.py:114",
        ("set.captions.tag_dropout", "set.caption_dropout"),
        sets.dropped_tags,
    ),
    *part_of("text.tag_dropout_probability@ConceptConfig.py:116 text.tag_dropout_mode@ConceptConfig.py:115"),
    turned("text.tag_dropout_special_tags*@ConceptConfig.py:118", (), sets.of_tags),
    never("text.caps_randomize_enable@ConceptConfig.py:120", "captions keep their capitals"),
    turned(
        "text.caps_randomize_*@ConceptConfig.py:120",
        (),
        only_with("text.caps_randomize_enable"),
    ),
    turned(
        "text.prompt_path@ConceptConfig.py:110",
        (),
        lambda v, s: Lost("see prompt_source") if s.get("text.prompt_source") == "concept" else NOTHING,
    ),
    turned(
        "loss_weight@ConceptConfig.py:197",
        (),
        lambda v, s: NOTHING if v == 1.0 else Lost("of [[data.sets]] only those of regularization have a weight"),
    ),
    always("include_subdirectories@ConceptConfig.py:192", "images in folders below count, too"),
    *part_of("balancing_strategy@ConceptConfig.py:196"),
    *needless(
        "it is about the window, or which random numbers are drawn",
        "name@ConceptConfig.py:187 seed@ConceptConfig.py:189 concept_stats@ConceptConfig.py:198 "
        "concept_stats.*@ConceptConfig.py:198 __version@modules/util/config/BaseConfig.py:48",
    ),
    *needless("sets that are off are left out", "enabled@ConceptConfig.py:190"),
]


PROGRAM: Final = Program(
    "OneTrainer",
    own.is_mine,
    own.read,
    _ROWS,
    _SET_ROWS,
    "https://github.com/Nerogar/OneTrainer/blob/23df383/modules/util/config/TrainConfig.py, sets in ConceptConfig.py",
)
