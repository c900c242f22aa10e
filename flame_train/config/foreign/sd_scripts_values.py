"""Conversions that are sd-scripts' own: schedules, noise levels, checkpoints, images and captions.

Places are in kohya-ss/sd-scripts.
"""

from __future__ import annotations

from typing import Any, Final

from flame_train.families import FAMILY_TITLES, named_by

from .conversions import number, sampled, sampled_as_flux, to_float, warmup
from .conversions import optimizer as optimizer_by_name
from .conversions import schedule as by_name
from .table import NOTHING, Changed, Lost, Source, is_off

_MODELS: Final = named_by("sd-scripts") | named_by("sd-scripts types")
HUBERS: Final = ("huber", "smooth_l1")


def loss(value: Any, source: Source) -> Any:
    kind = {"l2": "mse"}.get(str(value), str(value))
    if kind in HUBERS and source.get("huber_schedule") is None:
        return {"loss.kind": kind, "loss.huber_schedule": "snr"}
    return kind if kind == "mse" else {"loss.kind": kind}


def noise_levels(value: Any, source: Source) -> Any:
    """--timestep_sampling of Flux, Chroma and Anima; sigma draws from a table that --discrete_flow_shift shifted.

    Flux has a weight of each level with a model_prediction_type alone that is not here (flux_train_utils.py:545).
    """
    anima = bool(source.fact("sd_scripts_weighs_levels"))
    shift, std = source.get("discrete_flow_shift", 1.0 if anima else 3.0), _number_of(source, "sigmoid_scale", 1.0)
    scheme = source.get("weighting_scheme", "uniform")
    weight = {"loss.weighting": scheme} if anima and scheme in _WEIGHTS else {}
    if value == "sigma":
        density = _density(scheme, shift, source, -1.0)
        return density if isinstance(density, Lost) else density | weight
    if value == "flux_shift" and not source.fact("guidance"):
        answer = sampled_as_flux("sigmoid", source, std)
        return Changed(answer.value | weight, answer.remark)
    known = {
        "uniform": sampled("uniform", 1.0),
        "sigmoid": sampled("sigmoid", 1.0, std),
        "shift": sampled("sigmoid", shift, std),
        "flux_shift": sampled("sigmoid", 0.0, std),
    }
    if value not in known:
        return Lost("expected sigma, uniform, sigmoid, shift or flux_shift")
    return known[value] | weight


def noise_levels_sd3(value: Any, source: Source) -> Any:
    """--weighting_scheme: the density of levels, or their weight on an error of the image (sd3_train_network.py:353).

    That error is the noise level times ours, so a weight of 1 / level^2 there is none here.
    """
    density = _density(value, source.get("training_shift", 1.0), source, 1.0)
    if isinstance(density, Lost) or value == "sigma_sqrt":
        return density
    return Changed(density, "there the loss of a level counts level^2 times as much, which is not here")


_WEIGHTS: Final = ("sigma_sqrt", "cosmap")


def _density(scheme: Any, shift: Any, source: Source, sign: float) -> Any:
    """Returns the density of levels of a --weighting_scheme; `sign` is -1 where they are counted from the end."""
    if scheme in ("none", "uniform", None, *_WEIGHTS):
        return sampled("uniform", shift)
    if scheme == "logit_normal":
        mean, std = sign * _number_of(source, "logit_mean", 0.0), _number_of(source, "logit_std", 1.0)
        return sampled("logit_normal", shift, std) | ({"loss.logit_mean": mean} if mean else {})
    if scheme == "mode":
        return sampled("mode", shift) | {"loss.mode_scale": _number_of(source, "mode_scale", 1.29)}
    return Lost("no such weighting_scheme here")


def _number_of(source: Source, name: str, usual: float) -> float:
    return float(number(source.get(name, usual)))


def raw(value: Any, source: Source) -> Any:
    if value == "raw":
        return NOTHING
    return Lost(f"always raw here, not {value}; a learning rate found with that may not fit")


def kept(value: Any, source: Source) -> Any:
    """How many checkpoints stay: all, or those of --save_last_n_* (train_util.py:5786): so many, or a span of steps."""
    if not is_off(every := number(source.get("save_every_n_steps"))):
        span = number(source.get("save_last_n_steps"))
        return (
            0 if is_off(span) else Changed(span // every + 1, f"checkpoints: a span of {span} steps, one every {every}")
        )
    if is_off(number(source.get("save_every_n_epochs"))) and is_off(number(source.get("save_n_epoch_ratio"))):
        return NOTHING
    return number(source.get("save_last_n_epochs")) or 0


def saved(value: Any, source: Source) -> Any:
    """--save_n_epoch_ratio: so many checkpoints in all (train_network.py:981)."""
    epochs, count = number(source.get("max_train_epochs")), number(value)
    if is_off(count):
        return NOTHING
    if is_off(epochs):
        return Lost("an interval stands in checkpoint.every or checkpoint.every_epochs")
    return Changed(max(1, epochs // count), f"{count} of {epochs} epochs")


def steps(value: Any, source: Source) -> Any:
    """--max_train_steps, which --max_train_epochs overrides (train_network.py:799)."""
    if not is_off(number(source.get("max_train_epochs"))):
        return NOTHING
    if is_off(number(value)):
        return Lost("no steps are no training; set train.steps or train.epochs, or the default of train.steps holds")
    return number(value)


def schedule(value: Any, source: Source) -> Any:
    """--lr_scheduler. A schedule-free optimizer has none, and Adafactor's relative steps have their own."""
    if _by_itself(source):
        return "constant"
    if not is_off(source.get("lr_scheduler_type")):
        return NOTHING
    name, cycles = str(value).lower(), number(source.get("lr_scheduler_num_cycles", 1))
    if name == "cosine_with_min_lr" and cycles not in (1, None, ""):
        return Changed("cosine", "", (f"lr_scheduler_num_cycles = {cycles}: it falls once here",))
    return {"adafactor": "constant", "cosine_with_min_lr": "cosine"}.get(name) or by_name(name, source)


def rise(value: Any, source: Source) -> Any:
    """--lr_warmup_steps: a float is a share of the run (train_util.py:5276)."""
    return NOTHING if _by_itself(source) else warmup(value, source)


def decay(value: Any, source: Source) -> Any:
    """--lr_decay_steps, which warmup_stable_decay alone has; a float is a share of the run."""
    steps, length = number(value), number(source.get("max_train_steps", 1600))
    if is_off(steps) or source.get("lr_scheduler") != "warmup_stable_decay":
        return NOTHING
    if isinstance(steps, float):
        return steps
    if not is_off(number(source.get("max_train_epochs"))):
        return Lost("schedule.decay is a share of the run, and no number of steps: divide by its steps")
    return Changed(round(steps / length, 6), f"a share of {length} steps")


def _by_itself(source: Source) -> bool:
    """Says whether the optimizer needs no schedule (train_util.py:5239 and 5082)."""
    name = str(source.get("optimizer_type", "")).lower()
    relative = source.get("optimizer_args.relative_step", True) or source.get("optimizer_args.warmup_init")
    return name.endswith("schedulefree") or (name == "adafactor" and not is_off(relative))


def least_rate(value: Any, source: Source) -> Any:
    """--lr_scheduler_min_lr_ratio, which two schedules read."""
    ratio, peak = number(value), number(source.get("unet_lr") or source.get("learning_rate") or 0)
    if is_off(ratio) or source.get("lr_scheduler") not in ("cosine_with_min_lr", "warmup_stable_decay"):
        return NOTHING
    return Changed(float(ratio) * float(peak), "a rate here, and no ratio")


def optimizer(value: Any, source: Source) -> Any:
    """--optimizer_type, with the defaults of its own that ours do not share (train_util.py:4822)."""
    name = str(value or "AdamW").rsplit(".", 1)[-1].lower()
    arguments = {key for key in source.settings if key.startswith("optimizer_args.")}

    def lacking(**usual: Any) -> dict[str, Any]:
        return {f"optimizer.{key}": each for key, each in usual.items() if f"optimizer_args.{key}" not in arguments}

    if name == "adafactor":
        relative = not is_off(source.get("optimizer_args.warmup_init"))
        own = {"optimizer.relative_step": True} if relative else lacking(relative_step=True)
        return {"optimizer.name": "adafactor"} | own | lacking(scale_parameter=True)
    if name in ("sgdnesterov", "sgdnesterov8bit"):
        return {"optimizer.name": "sgd", "optimizer.nesterov": True} | lacking(momentum=0.9, weight_decay=0.0)
    if name in ("adam", "sgd"):
        keys = {"optimizer.name": {"adam": "adamw"}.get(name, name)} | lacking(weight_decay=0.0)
        return Changed(keys, "the nearest to Adam here") if name == "adam" else keys
    if name in ("pagedadamw", "pagedadamw32bit"):
        return "adamw"
    return optimizer_by_name(value, source)


def decoupled(value: Any, source: Source) -> Any:
    """Prodigy's switch: here decay is always decoupled from the gradient; without decay there is nothing to couple."""
    if value is True or is_off(number(source.get("optimizer_args.weight_decay"))):
        return NOTHING
    return Lost("weight decay is always decoupled here")


def usual_rate(value: Any, source: Source) -> Any:
    """--learning_rate, the denoiser's where it has none of its own."""
    return NOTHING if not is_off(number(source.get("unet_lr"))) else rate(value, source)


def rate(value: Any, source: Source) -> Any:
    """Converts the rate of the denoiser; Adafactor's relative steps leave it out (train_util.py:5060)."""
    name = str(source.get("optimizer_type", "")).lower()
    return 1.0 if name == "adafactor" and _by_itself(source) else to_float(value, source)


def tracked(value: Any, source: Source) -> Any:
    """--log_with: TensorBoard, or the project at Weights & Biases that --log_tracker_name names."""
    project = source.get("log_tracker_name") or "network_train"
    return {
        "tensorboard": {"output.tensorboard": True},
        "wandb": {"output.wandb": project},
        "all": {"output.tensorboard": True, "output.wandb": project},
    }.get(value, NOTHING)


def of_wandb(value: Any, source: Source) -> Any:
    """Converts the run's name and key at Weights & Biases, which only a run that logs there reads."""
    used = source.get("log_with") in ("wandb", "all") and not is_off(value)
    return Lost("output.wandb names a project; its own tools have the key and the name") if used else NOTHING


def unused_span(value: Any, source: Source) -> Any:
    """Converts the same of the span of noise levels, whose ends are 0 and 1000."""
    return NOTHING if number(value) == 1000 else unused(value, source)


def unused(value: Any, source: Source) -> Any:
    """Converts a setting of diffusion by noise prediction, which sd-scripts does not read for a model of flow."""
    title = source.fact("short_title") or FAMILY_TITLES[source.family]
    return NOTHING if is_off(number(value)) else Lost(f"sd-scripts does not use it for {title} either")


def with_(other: str) -> Any:
    """Returns a setting that means something beside another one."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(number(value)) or is_off(number(source.get(other))):
            return NOTHING
        return value if isinstance(value, bool) else number(value)

    return convert


def unsampled(value: Any, source: Source) -> Any:
    """No images where prompts have no interval (train_util.py:6380)."""
    has_interval = any(not is_off(number(source.get(f"sample_every_n_{unit}"))) for unit in ("steps", "epochs"))
    return NOTHING if has_interval or is_off(source.get("sample_prompts")) else 0


def bf16_master(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else Lost("adapters are always fp32 here")


def discount(value: Any, source: Source) -> Any:
    """--multires_noise_discount, which means something beside iterations, and for models of noise prediction."""
    flow = source.family in _MODELS.values() and not source.fact("unet")
    return NOTHING if flow or is_off(source.get("multires_noise_iterations")) else float(number(value))


_BUCKETS: Final = "images go into buckets of their shape"


def masks(data: str) -> Any:
    """Returns a folder of masks, which sd-scripts reads where the loss is masked."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(value):
            return NOTHING
        if is_off(source.get("masked_loss")):
            return Lost("sd-scripts reads it with masked_loss alone")
        return {f"{data}.masks": "files", f"{data}.mask_folder": value}

    return convert


def held_out(value: Any, source: Source) -> Any:
    """Converts a folder that is only validated on; a share of one has no counterpart, a share of all images has."""
    if is_off(value):
        return NOTHING
    return True if value == 1 else Lost("validation.fraction is a share of all images")


def bucket_bound(usual: int) -> Any:
    """Returns a bound of bucket sides, which holds where images are enlarged and bucketed (train_util.py:1007)."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(source.get("enable_bucket")) or not is_off(source.get("bucket_no_upscale")):
            return NOTHING
        return number(value) or usual

    return convert


def bucketed(value: Any, source: Source) -> Any:
    if not is_off(value):
        return NOTHING
    return Lost(f"{_BUCKETS}; sd-scripts without it crops them to the square")


def named_folders(value: Any, source: Source) -> Any:
    """Folders N_name: their repeats, and their name for an image without a caption (config_util.py:607)."""
    return {"set.folder_repeats": True, "set.captions.folder_name": True}


def dropout(value: Any, source: Source) -> Any:
    rate = to_float(value, source)
    return NOTHING if is_off(rate) else rate
