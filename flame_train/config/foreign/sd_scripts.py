"""sd-scripts: its TOML, flat or in sections, its dataset TOML, and a saved command line.

Places are in kohya-ss/sd-scripts: scripts at its top, else in `library/` and `networks/`.
"""

from __future__ import annotations

from typing import Any, Final

from . import sd_scripts_values as own
from .conversions import (
    MIN_SNR,
    SAMPLED,
    WARMUP,
    checkpoint,
    min_snr,
    number,
    number_format,
    one_of,
    optimizer_keys,
    sampler,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
    weighting,
    where,
)
from .sd_scripts_images import OF_CONFIG, OF_SETS
from .sd_scripts_networks import ROWS
from .sd_scripts_reading import is_mine, read
from .table import NOTHING, Lost, Program, Row, always, is_off, keep, needless, never, part_of, turned

_FLOW: Final = ("sd3", "flux", "chroma", "anima")
_FLUX: Final = ("flux", "chroma")
_NO_CLASS: Final = "no class path stands in a config; schedule.name has the schedules"
_NOISED: Final = (*_FLUX, "anima")
_LEVELS: Final = (*SAMPLED, "loss.weighting", "loss.mode_scale")
_OPTIMIZER: Final = (
    *("optimizer.name", "optimizer.relative_step", "optimizer.scale_parameter"),
    *("optimizer.momentum", "optimizer.nesterov", "optimizer.weight_decay"),
)


def _of_noise(key: str, to: str | tuple[str, ...], convert: Any, say: str = "") -> list[Row]:
    """A setting of noise prediction: models of flow do not read it there (flux_train_network.py:436, sd3_...:395)."""
    return [turned(key, (), own.unused, families=_FLOW), turned(key, to, convert, say=say)]


_MODEL: Final = [
    turned("pretrained_model_name_or_path@train_util.py:3649", "model.checkpoint", checkpoint),
    turned("vae@train_util.py:3945", "model.vae", unless_off),
    turned("ae@flux_train_utils.py:628", "model.vae", unless_off),
    turned("clip_l@flux_train_utils.py:618", "text_encoders.clip_l", unless_off),
    turned("clip_g@sd3_train_utils.py:151", "text_encoders.clip_g", unless_off),
    turned("t5xxl@flux_train_utils.py:623", "text_encoders.t5", unless_off),
    turned("qwen3@anima_train_utils.py:34", "text_encoders.qwen3", unless_off),
    turned("v_parameterization@train_util.py:3646", "model.prediction", switched("v")),
    *(turned(name, "model.prediction", switched("flow")) for name in ("flow_model", "flow_matching")),
    *(
        turned(name, "model.quantize", switched("fp8"))
        for name in ("fp8_base@train_util.py:3997", "fp8_base_unet@train_network.py:1771")
    ),
    turned("mixed_precision@train_util.py:3980", "train.precision", number_format, absent="no"),
    swapped("blocks_to_swap", "gradient_checkpointing"),
    turned("t5xxl_max_token_length@flux_train_utils.py:635", "text_encoders.t5_tokens", unless_off),
    turned("clip_l_dropout_rate@sd3_train_utils.py:203", "text_encoders.clip_l_dropout", unless_off),
    turned("clip_g_dropout_rate@sd3_train_utils.py:209", "text_encoders.clip_g_dropout", unless_off),
    turned("t5_dropout_rate@sd3_train_utils.py:215", "text_encoders.t5_dropout", unless_off),
    Row(
        "apply_t5_attn_mask",
        (),
        lambda v, s: NOTHING,
        families=("chroma",),
        at="flux_train_network.py:54",
        inert="Chroma always has it",
    ),
    never(
        "apply_t5_attn_mask@flux_train_utils.py:642",
        "encoders and transformer attend to padding, as these models were trained; nearest is "
        'text_encoders.t5_padding = "masked", with which the transformer sees zeros in its place',
    ),
    never(
        "apply_lg_attn_mask@sd3_train_utils.py:193",
        "encoders and transformer attend to padding, as these models were trained",
    ),
    never("pos_emb_random_crop_rate@sd3_train_utils.py:221", "positions are those of the middle"),
    never("enable_scaled_pos_embed@sd3_train_utils.py:228", "positions are those of the published model"),
    never("t5xxl_dtype@sd3_train_utils.py:180", "text_encoders.precision is the number format of text encoders"),
    never("controlnet_model_name_or_path@flux_train_utils.py:629", "no ControlNet is trained here"),
    never("llm_adapter_path@anima_train_utils.py:40", "the adapter lies in the checkpoint"),
    *(
        never(f"{name}@anima_train_utils.py:46", "a rate of some layers is one of [[lora.rules]]; write it by hand")
        for name in ("llm_adapter_lr", "self_attn_lr", "cross_attn_lr", "mlp_lr", "mod_lr")
    ),
    turned("max_token_length@flux_train_network.py:74", (), own.unused, families=_FLOW),
    turned("max_token_length@train_util.py:3901", "data.max_tokens", to_number),
    Row(
        "clip_skip",
        (),
        lambda v, s: NOTHING,
        say="always the penultimate layer, as these models were trained; remove it",
        at="strategy_sdxl.py:132",
        inert="sd-scripts takes the penultimate layer of these models, whatever it says",
    ),
]

_STEPS: Final = [
    turned("unet_lr@train_network.py:1763", "optimizer.lr", own.rate),
    turned("learning_rate@train_util.py:3701", "optimizer.lr", own.usual_rate, absent=2e-6),
    turned("optimizer_type@train_util.py:3678", _OPTIMIZER, own.optimizer),
    turned(
        "use_8bit_adam@train_util.py:3690",
        "optimizer.name",
        switched("adamw8bit"),
        say='write optimizer.name = "adamw8bit"',
    ),
    turned(
        "use_lion_optimizer@train_util.py:3695", "optimizer.name", switched("lion"), say='write optimizer.name = "lion"'
    ),
    turned("optimizer_args.decouple@train_util.py:4874", "optimizer.weight_decay", own.decoupled),
    turned("lr_scheduler@train_util.py:3740", "schedule.name", own.schedule, absent="constant"),
    turned("lr_warmup_steps@train_util.py:3746", WARMUP, own.rise),
    turned(
        "lr_scheduler_num_cycles@train_util.py:3760",
        "schedule.cycles",
        where("lr_scheduler", ("cosine_with_restarts",), to_number),
    ),
    turned("lr_scheduler_power@train_util.py:3766", "schedule.power", where("lr_scheduler", ("polynomial",), to_float)),
    turned(
        "lr_scheduler_timescale@train_util.py:3778",
        "schedule.timescale",
        where("lr_scheduler", ("inverse_sqrt",), unless_off),
    ),
    turned(
        "lr_scheduler_min_lr_ratio@train_util.py:3785",
        "schedule.min_lr",
        own.least_rate,
        say="schedule.min_lr is a rate, and no ratio: multiply by optimizer.lr",
    ),
    turned(
        "lr_decay_steps@train_util.py:3753",
        "schedule.decay",
        own.decay,
        say="schedule.decay is a share of the run, and no number of steps: divide by train.steps",
    ),
    never("lr_scheduler_type@train_util.py:5300", f"{_NO_CLASS}; it stays at its default"),
    never("lr_scheduler_args.*@train_util.py:5288", _NO_CLASS),
    turned(
        "max_train_epochs@train_network.py:799",
        "train.epochs",
        unless_off,
        say="train.epochs counts epochs, train.steps optimizer steps",
    ),
    turned("max_train_steps@train_util.py:3952", "train.steps", own.steps, absent=1600),
    turned("gradient_accumulation_steps@train_util.py:3974", "gradient.accumulation", to_number),
    turned(
        "gradient_checkpointing@train_util.py:3971",
        "gradient.checkpointing",
        lambda v, s: NOTHING if is_off(v) else ("offload" if s.get("cpu_offload_checkpointing") else "full"),
    ),
    *part_of("cpu_offload_checkpointing@train_network.py:1746"),
    turned("unsloth_offload_checkpointing@anima_train_network.py:428", "gradient.checkpointing", switched("offload")),
    turned("max_grad_norm@train_util.py:3702", "gradient.clip_norm", to_float),
    *(
        Row(name, (), own.bf16_master, at=at)
        for name, at in (("full_bf16", "train_util.py:3992"), ("full_fp16", "train_util.py:3987"))
    ),
    turned("seed@train_util.py:3970", "train.seed", to_number),
]

_LOSS: Final = [
    *_of_noise("min_snr_gamma@custom_train_functions.py:116", MIN_SNR, min_snr),
    *_of_noise(
        "debiased_estimation_loss@custom_train_functions.py:133",
        "loss.weighting",
        weighting("debiased"),
        say='write loss.weighting = "debiased"',
    ),
    never(
        "scale_v_pred_loss_like_noise_pred@custom_train_functions.py:122",
        "loss.weighting has min-SNR and soft min-SNR for v",
    ),
    never("v_pred_like_loss@custom_train_functions.py:127", "loss.weighting has min-SNR and soft min-SNR for v"),
    turned("loss_type@train_util.py:4132", ("loss.kind", "loss.huber_schedule"), own.loss),
    turned("huber_schedule@train_util.py:4139", "loss.huber_schedule", where("loss_type", own.HUBERS, keep)),
    turned("huber_c@train_util.py:4147", "loss.huber_c", where("loss_type", own.HUBERS, to_float)),
    turned("huber_scale@train_util.py:4155", "loss.huber_scale", where("loss_type", own.HUBERS, to_float)),
    turned("timestep_sampling@flux_train_utils.py:655", _LEVELS, own.noise_levels, absent="sigma", families=_FLUX),
    turned(
        "timestep_sampling@anima_train_utils.py:100", _LEVELS, own.noise_levels, absent="sigmoid", families=["anima"]
    ),
    turned("weighting_scheme@train_util.py:4277", _LEVELS, own.noise_levels_sd3, absent="uniform", families=["sd3"]),
    *part_of(
        "weighting_scheme@train_util.py:4277 training_shift@sd3_train_utils.py:237 logit_mean@train_util.py:4285 "
        "logit_std@train_util.py:4291 mode_scale@train_util.py:4297 discrete_flow_shift@flux_train_utils.py:677 "
        "sigmoid_scale@flux_train_utils.py:662"
    ),
    Row("timestep_sampling", (), lambda v, s: Lost("flow models alone have it in sd-scripts")),
    Row(
        "model_prediction_type",
        (),
        own.raw,
        "sigma_scaled",
        _FLUX,
        say="always raw; remove it",
        at="flux_train_utils.py:668",
    ),
    turned("guidance_scale@flux_train_utils.py:648", "loss.guidance_scale", to_float, absent=3.5, families=_FLUX),
    *(turned(f"{name}@flux_train_utils.py:471", (), own.unused, families=_NOISED) for name in own.SPAN),
    *(
        turned(f"{name}@train_util.py:4120", f"loss.{name}", unless_off, f"loss.{name} is the same, in thousandths")
        for name in own.SPAN
    ),
    *_of_noise("zero_terminal_snr@train_util.py:4115", "loss.zero_terminal_snr", switched(True)),
    *_of_noise("noise_offset@train_util.py:4067", "loss.offset_noise", unless_off),
    *_of_noise(
        "noise_offset_random_strength@train_util.py:4073", "loss.offset_noise_random", own.with_("noise_offset")
    ),
    *_of_noise("adaptive_noise_scale@train_util.py:4109", "loss.offset_noise_adaptive", own.with_("noise_offset")),
    *_of_noise("multires_noise_iterations@train_util.py:4078", "loss.pyramid_noise", unless_off),
    turned(
        "multires_noise_discount@train_util.py:4103",
        "loss.pyramid_noise_discount",
        lambda v, s: NOTHING if s.family in _FLOW or is_off(s.get("multires_noise_iterations")) else float(number(v)),
    ),
    turned("ip_noise_gamma@sd3_train_utils.py:918", (), own.unused, families=["sd3"]),
    turned("ip_noise_gamma@train_util.py:4084", "loss.input_perturbation", unless_off),
    turned("ip_noise_gamma_random_strength@sd3_train_utils.py:918", (), own.unused, families=["sd3"]),
    turned(
        "ip_noise_gamma_random_strength@train_util.py:4091",
        "loss.input_perturbation_random",
        own.with_("ip_noise_gamma"),
    ),
]

_KEPT: Final = [
    turned("save_every_n_steps@train_util.py:3852", "checkpoint.every", unless_off),
    turned(
        "save_every_n_epochs@train_util.py:3846",
        "checkpoint.every_epochs",
        unless_off,
        say="checkpoint.every_epochs counts epochs, checkpoint.every steps",
    ),
    turned("save_n_epoch_ratio@train_network.py:980", "checkpoint.every_epochs", own.saved),
    turned("(checkpoints)", "checkpoint.keep", own.kept, absent="all stay"),
    *part_of(
        "save_last_n_steps@train_util.py:5796",
        "checkpoint.keep counts checkpoints; a span of steps there: divide by the interval and add 1",
    ),
    *part_of(
        "save_last_n_epochs@train_util.py:5786",
        "checkpoint.keep counts checkpoints; a span of epochs there, counted in checkpoints",
    ),
    *needless(
        "the states of the newest checkpoints are kept, from which a stopped run goes on",
        "save_state@train_util.py:3888 save_state_on_train_end@train_util.py:3893 "
        "save_last_n_epochs_state@train_util.py:3870 save_last_n_steps_state@train_util.py:3882",
    ),
    never("resume@train_util.py:3898", "a state of sd-scripts does not go on here; lora.from begins with its LoRA"),
    *(
        never(name, "a stopped run goes on by itself, where it stopped")
        for name in (
            "initial_epoch@train_network.py:1858",
            "initial_step@train_network.py:1865",
            "skip_until_initial_step@train_network.py:1853",
        )
    ),
    turned("sample_every_n_steps@train_util.py:4175", "sample.every", unless_off),
    turned(
        "sample_every_n_epochs@train_util.py:4184",
        "sample.every_epochs",
        unless_off,
        say="sample.every_epochs counts epochs, sample.every steps",
    ),
    turned("sample_prompts@train_util.py:4190", ("sample.prompt_file", "sample.prompts"), own.prompts),
    turned("(samples)", "sample.every", own.unsampled, absent="drawn when asked for"),
    turned("sample_sampler@train_util.py:4196", "sample.sampler", sampler),
    never("sample_at_first@train_util.py:4181", "grids come after steps, none before the first"),
    turned("validation_split@train_network.py:1878", "validation.fraction", unless_off),
    turned("validate_every_n_steps@train_network.py:1884", "validation.every", unless_off),
    turned("validate_every_n_epochs@train_network.py:1890", "validation.every_epochs", unless_off),
    never("validation_seed@train_network.py:1872", "images are held out by the hash of each, whatever the seed"),
    never("max_validation_steps@train_network.py:1896", "a validation measures all images that are held out"),
]

_OUTPUT: Final = [
    turned(
        "output_dir@train_util.py:3795",
        "output.dir",
        lambda v, s: f"{v}/{s.get('output_name')}" if s.get("output_name") else v,
    ),
    turned("output_name@train_util.py:3798", "output.name", unless_off),
    turned(
        "save_model_as@train_network.py:1755",
        "output.format",
        one_of({"safetensors": "kohya", None: "kohya"}, "files are always safetensors here"),
    ),
    turned(
        "save_precision@train_util.py:3839",
        "output.precision",
        lambda v, s: "fp32" if v is None else number_format(v, s),
        absent="float",
    ),
    turned("metadata_title@sai_model_spec.py:589", "output.title", unless_off),
    turned("metadata_author@sai_model_spec.py:595", "output.author", unless_off),
    turned("metadata_trigger_phrase@sai_model_spec.py:637", "output.trigger", unless_off),
    never("metadata_*@sai_model_spec.py:601", "output.title, author and trigger are what metadata take of a config"),
    never(
        "training_comment@train_network.py:1817",
        "write it into output.title, which web interfaces show; there is no place for a comment of one's own",
    ),
    never("no_metadata@train_network.py:1752", "metadata are always written; they have no path and no time"),
    turned("log_with@train_util.py:4031", ("output.tensorboard", "output.wandb"), own.tracked),
    *part_of("log_tracker_name@train_util.py:4041"),
    *needless(
        "the run's folder holds its logs",
        "logging_dir@train_util.py:4025 log_prefix@train_util.py:4038 log_tracker_config@train_util.py:4053 "
        "log_config@train_util.py:4065 console_log_level@utils.py:25 console_log_file@utils.py:32 "
        "console_log_simple@utils.py:38",
    ),
    *(
        never(name, "uploads are not here; output.wandb names a project")
        for name in (
            "huggingface_*@train_util.py:3801",
            "wandb_*@train_util.py:4047",
            "async_upload@train_util.py:3834",
            "save_state_to_huggingface@train_util.py:3826",
            "resume_from_huggingface@train_util.py:3829",
        )
    ),
]

_HOW: Final = [
    *(
        always(name, "latents and captions are encoded once, on disk")
        for name in (
            "cache_latents@train_util.py:4566",
            "cache_latents_to_disk@train_util.py:4574",
            "cache_text_encoder_outputs@train_util.py:4253",
            "cache_text_encoder_outputs_to_disk@train_util.py:4256",
        )
    ),
    *needless(
        "flame-train chooses it",
        "xformers@train_util.py:3939 sdpa@train_util.py:3940 mem_eff_attn@train_util.py:3908 "
        "attn_mode@anima_train_utils.py:113 split_attn@anima_train_utils.py:120 "
        "lowram@train_util.py:4163 highvram@train_util.py:4168 torch_compile@train_util.py:3913 "
        "dynamo_backend@train_util.py:3916 max_data_loader_n_workers@train_util.py:3959 "
        "persistent_data_loader_workers@train_util.py:3965 vae_batch_size@train_util.py:4571 "
        "text_encoder_batch_size@train_util.py:4261 disable_mmap_load_safetensors@train_util.py:4270 "
        "skip_cache_check@train_util.py:4579 t5xxl_device@sd3_train_utils.py:174 "
        "vae_chunk_size@anima_train_utils.py:125 vae_disable_cache@anima_train_utils.py:132 "
        "split_mode@flux_train_network.py:528 num_cpu_threads_per_process@class_accelerate_launch.py:43 "
        "no_half_vae@train_network.py:1848",
    ),
    *needless(
        "tokenizers are here", "tokenizer_cache_dir@train_util.py:3655 t5_tokenizer_path@anima_train_utils.py:76"
    ),
    *needless(
        "sd-scripts does not use it for a LoRA",
        "use_safetensors@train_util.py:4693 save_clip@sd3_train_utils.py:163 save_t5xxl@sd3_train_utils.py:168 "
        "fused_backward_pass@train_util.py:3772 v2@sdxl_train_util.py:345",
    ),
    *needless(
        "sd-scripts has no such argument; its web interface writes it",
        "epoch@lora_gui.py:2201 noise_offset_type@lora_gui.py:2291 stop_text_encoder_training@lora_gui.py:2339 "
        "mem_eff_save@lora_gui.py:2398 single_blocks_to_swap@lora_gui.py:2412 double_blocks_to_swap@lora_gui.py:2413",
    ),
    *needless("its settings are read", "config_file@train_util.py:4221"),
    never("debug_dataset@train_network.py:558", "`flame-train dataset` shows what is trained on"),
    never("output_config@train_util.py:4227", "the run is not written out, but trained"),
    never("dataset_class@train_util.py:4640", "no class of Python is loaded"),
    *(
        never(f"{name}@anima_train_utils.py:82", "the length is 512 tokens")
        for name in ("qwen3_max_token_length", "t5_max_token_length")
    ),
    *(
        never(name, "docs/several-gpus.md says how several GPUs are used")
        for name in (
            "deepspeed@deepspeed_utils.py:18",
            "ddp_*@train_util.py:4003",
            "zero*@deepspeed_utils.py:19",
            "offload_*@deepspeed_utils.py:20",
        )
    ),
]

PROGRAM: Final = Program(
    "sd-scripts",
    is_mine,
    read,
    [*_MODEL, *ROWS, *_STEPS, *_LOSS, *_KEPT, *_OUTPUT, *_HOW, *OF_CONFIG, *optimizer_keys("optimizer_args.")],
    OF_SETS,
    "kohya-ss/sd-scripts@48d368f",
)
