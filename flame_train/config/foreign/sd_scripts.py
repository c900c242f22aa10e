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
    optimizer_keys,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
    weighting,
    where,
)
from .sd_scripts_files import HOW, KEPT, OUTPUT
from .sd_scripts_images import OF_CONFIG, OF_SETS
from .sd_scripts_networks import ROWS
from .sd_scripts_reading import is_mine, read
from .table import NOTHING, Lost, Program, Row, is_off, keep, never, part_of, turned

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
    swapped("blocks_to_swap@train_util.py:4305", "gradient_checkpointing"),
    turned("t5xxl_max_token_length@flux_train_utils.py:635", "text_encoders.t5_tokens", to_number),
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
        never(f"{name}@anima_train_utils.py:{line}", "a rate of some layers is one of [[lora.rules]]; write it by hand")
        for name, line in (
            ("llm_adapter_lr", 46),
            ("self_attn_lr", 52),
            ("cross_attn_lr", 58),
            ("mlp_lr", 64),
            ("mod_lr", 70),
        )
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
    Row(
        "timestep_sampling",
        (),
        lambda v, s: Lost("flow models alone have it in sd-scripts"),
        at="flux_train_utils.py:655",
    ),
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
    *(turned(f"{name}@flux_train_utils.py:471", (), own.unused_span, families=_NOISED) for name in own.SPAN),
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

PROGRAM: Final = Program(
    "sd-scripts",
    is_mine,
    read,
    [
        *_MODEL,
        *ROWS,
        *_STEPS,
        *_LOSS,
        *KEPT,
        *OUTPUT,
        *HOW,
        *OF_CONFIG,
        *optimizer_keys("optimizer_args.", at="train_util.py:4874"),
    ],
    OF_SETS,
    "kohya-ss/sd-scripts@48d368f",
)
