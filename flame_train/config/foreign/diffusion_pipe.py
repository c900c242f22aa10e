"""diffusion-pipe's TOML, and the dataset TOML that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flame_train.errors import ConfigError

from .conversions import (
    MIN_SNR,
    checkpoint,
    min_snr,
    number_format,
    optimizer,
    optimizer_keys,
    sampled,
    schedule,
    side,
    sides_of,
    swapped,
    switched,
    to_float,
    to_number,
    unless_off,
    weighting,
)
from .encoders import TRAINED, trained
from .table import (
    NOTHING,
    Lost,
    Program,
    Reading,
    Row,
    Setting,
    Source,
    Tree,
    is_off,
    needless,
    never,
    no_file,
    part_of,
    same,
    turned,
)

_FAMILIES: Final = ("sdxl", "sd3", "flux")
_SAMPLED: Final = ("loss.timestep_sampling", "loss.shift", "loss.logit_std")


def _is_mine(tree: Tree) -> bool:
    model = tree.get("model")
    if isinstance(tree.get("directory"), list):
        return True
    return isinstance(model, Mapping) and "type" in model and ("dataset" in tree or "adapter" in tree)


def _read(reading: Reading) -> Source:
    tree = reading.tree
    if "directory" in tree:
        return Source("", {}, _sets(reading))
    model = tree["model"]
    if model["type"] not in _FAMILIES:
        raise ConfigError(f"{reading.place(('model', 'type'))}: type = {model['type']}: expected sdxl, sd3 or flux")
    if "adapter" not in tree:
        raise ConfigError(f"{reading.file}: expected a LoRA ([adapter]); training of whole models is not here")
    settings = reading.flat(tree)
    named = settings.pop("dataset", None)
    notes: list[str] = []
    sets: list[dict[str, Setting]] = []
    if named is not None:
        other = reading.beside(str(named.value))
        sets = _sets(other) if other else []
        if other is None:
            notes.append(no_file("dataset", named, "its folders are"))
    return Source(model["type"], settings, sets + _held_out(reading, settings, notes), notes)


def _held_out(reading: Reading, settings: Mapping[str, Setting], notes: list[str]) -> list[dict[str, Setting]]:
    """The folders of eval_datasets, in files of their own."""
    found: list[dict[str, Setting]] = []
    named = settings.get("eval_datasets", Setting([], ""))
    for one in named.value:
        name = str(one.get("config", "") if isinstance(one, Mapping) else one)
        other = reading.beside(name)
        if other is None:
            notes.append(no_file("eval_datasets", Setting(name, named.place), "its folders are"))
        else:
            found += [each | {"validation": Setting(True, named.place)} for each in _sets(other)]
    return found


def _sets(reading: Reading) -> list[dict[str, Setting]]:
    shared = reading.flat({name: value for name, value in reading.tree.items() if name != "directory"})
    folders = reading.tree.get("directory", [])
    return [
        shared | reading.flat(one, ("directory", f"[{i}]"))
        for i, one in enumerate(folders if isinstance(folders, list) else [])
    ]


def _kind(value: Any, source: Source) -> Any:
    return value if value in ("lora", "lokr") else Lost("no such adapter here")


def _rank(value: Any, source: Source) -> Any:
    """Its alpha is the rank; in LoKr a rank above every layer's means matrices that are not decomposed."""
    if source.get("adapter.type") == "lokr" and value >= 4096:
        return {"lora.full_matrix": True}
    return {"lora.rank": int(value), "lora.alpha": float(value)}


def _targets(value: Any, source: Source) -> Any:
    return ["attention+mlp", "*.proj_in", "*.proj_out"] if source.family == "sdxl" else ["full"]


def _levels(value: Any, source: Source) -> Any:
    shift = 0.0 if source.get("model.flux_shift") else float(source.get("model.shift", 1.0))
    std = float(source.get("model.sigmoid_scale", 1.0))
    known = {"logit_normal": sampled("logit_normal", shift, std), "uniform": sampled("uniform", shift)}
    return known.get(value, Lost("expected logit_normal or uniform"))


def _batch(value: Any, source: Source) -> Any:
    if isinstance(value, list):
        return Lost("a batch size for each resolution: set one in data.batch_size")
    return value


def _float8(value: Any, source: Source) -> Any:
    return "fp8" if "8" in str(value) else NOTHING


def _resolutions(value: Any, source: Source) -> Any:
    if not isinstance(value, list) or not value:
        return Lost("expected a list of resolutions")
    if len(value) == 1:
        return (
            {"set.resolution": side(value[0], source)}
            if isinstance(side(value[0], source), int)
            else side(value[0], source)
        )
    return {"set.resolutions": [each for one in value for each in sides_of(one)[:1]]}


def _minutes(value: Any, source: Source) -> Any:
    return (
        NOTHING
        if is_off(value)
        else Lost("an interval in minutes: checkpoint.every counts steps, checkpoint.every_epochs epochs")
    )


def _masks(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else {"set.masks": "files", "set.mask_folder": value}


def _shuffled(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else {"set.captions.shuffle": True, "set.captions.variants": value}


def _encoders(value: Any, source: Source) -> Any:
    """Both CLIPs of SDXL are trained, at the optimizer's rate where they have none of their own."""
    rate = source.get("optimizer.lr")
    rates = {name: source.get(f"model.text_encoder_{i}_lr", rate) for i, name in ((1, "clip_l"), (2, "clip_g"))}
    return trained(rates, source.get("model.unet_lr", rate), "attention+mlp")


def _evaluated(value: Any, source: Source) -> Any:
    return value if source.get("eval_datasets") else NOTHING


def _one_stage(value: Any, source: Source) -> Any:
    return NOTHING if value == 1 else Lost("a run is one process on one GPU")


def _files(value: Any, source: Source) -> Any:
    """A transformer of its own beside a diffusers folder replaces that folder's; ours is the checkpoint."""
    return Lost(
        "a transformer of its own: name it in model.checkpoint, and the other files in [text_encoders] and model.vae"
    )


_ROWS: Final = [
    *(turned(f"model.{name}", "model.checkpoint", checkpoint) for name in ("checkpoint_path", "diffusers_path")),
    turned("model.transformer_path", "model.checkpoint", _files),
    turned("model.v_pred", "model.prediction", switched("v")),
    turned("model.dtype", "train.precision", number_format),
    turned("model.transformer_dtype", "model.quantize", _float8),
    turned("model.min_snr_gamma", MIN_SNR, min_snr),
    turned("model.debiased_estimation_loss", "loss.weighting", weighting("debiased")),
    turned("model.timestep_sample_method", _SAMPLED, _levels, absent="logit_normal", families=["sd3", "flux"]),
    *part_of(
        "model.flux_shift model.shift model.sigmoid_scale model.timestep_sample_method",
    ),
    turned("model.guidance", "loss.guidance_scale", to_float, families=["flux"]),
    never("model.bypass_guidance_embedding", "Flux's guidance is always an input; loss.guidance_scale = 1 is near it"),
    turned("(text encoders)", TRAINED, _encoders, absent="trained", families=["sdxl"]),
    *part_of("model.text_encoder_1_lr model.text_encoder_2_lr"),
    turned("model.unet_lr", "optimizer.lr", to_float),
    turned("adapter.type", "lora.kind", _kind),
    turned("adapter.rank", ("lora.rank", "lora.alpha", "lora.full_matrix"), _rank),
    turned("adapter.decompose_factor", "lora.factor", lambda v, s: v if v > 0 else NOTHING),
    turned("adapter.dropout", "lora.dropout", unless_off),
    turned("adapter.rank_dropout", "lora.rank_dropout", unless_off),
    turned("adapter.init_from_existing", "lora.from", unless_off),
    *needless("adapters are always fp32", "adapter.dtype"),
    never("adapter.fuse_adapters", "merge them into the base with `flame-train merge`"),
    turned("(layers)", "lora.targets", _targets, absent="all"),
    turned("optimizer.type", "optimizer.name", optimizer),
    turned("optimizer.lr", "optimizer.lr", to_float),
    *optimizer_keys("optimizer."),
    turned("lr_scheduler", "schedule.name", schedule, absent="constant"),
    turned("warmup_steps", "schedule.warmup_steps", unless_off),
    never("force_constant_lr", "a run keeps the rate that it began with"),
    turned("epochs", "train.epochs", to_number),
    turned("max_steps", "train.steps", unless_off),
    turned("micro_batch_size_per_gpu", "data.batch_size", _batch),
    turned("gradient_accumulation_steps", "gradient.accumulation", to_number),
    turned("gradient_clipping", "gradient.clip_norm", to_float),
    turned(
        "activation_checkpointing",
        "gradient.checkpointing",
        lambda v, s: NOTHING if not v else ("offload" if v == "unsloth" else "full"),
    ),
    turned(
        "pseudo_huber_c",
        ("loss.kind", "loss.huber_c", "loss.huber_schedule"),
        lambda v, s: {"loss.kind": "huber", "loss.huber_c": float(v)},
    ),
    turned("save_dtype", "output.precision", number_format),
    same("output_dir", "output.dir"),
    turned(
        "(output format)",
        "output.format",
        lambda v, s: "kohya" if s.family == "sdxl" else "diffusers",
        absent="its own",
    ),
    turned("save_every_n_epochs", "checkpoint.every_epochs", unless_off),
    turned("save_every_n_steps", "checkpoint.every", unless_off),
    turned("checkpoint_every_n_epochs", "checkpoint.every_epochs", unless_off),
    Row("checkpoint_every_n_minutes", (), _minutes),
    *(never(name, "an interval counts steps or epochs") for name in ("save_every_n_examples", "eval_every_n_examples")),
    Row("pipeline_stages", (), _one_stage),
    swapped("blocks_to_swap", "activation_checkpointing"),
    *part_of("eval_datasets"),
    turned("eval_every_n_epochs", "validation.every_epochs", _evaluated),
    turned("eval_every_n_steps", "validation.every", _evaluated),
    never("uncond_fraction", "data.caption_dropout is the share of images with an empty caption"),
    *needless("there is no evaluation without eval_datasets", "eval_* image_eval_* disable_block_swap_for_eval"),
    never("monitoring.enable_wandb", "set output.wandb to a project"),
    *needless(
        "flame-train chooses it, or nothing depends on it",
        "monitoring.* model.type reentrant_activation_checkpointing partition_* caching_batch_size "
        "map_num_proc compile steps_per_print logging_steps video_clip_mode x_axis_examples "
        "image_micro_batch_size_per_gpu model.cache_text_embeddings",
    ),
]

_SET_ROWS: Final = [
    same("path", "set.path"),
    turned("num_repeats", "set.repeats", to_number),
    turned("resolutions", ("set.resolution", "set.resolutions"), _resolutions),
    turned(
        "enable_ar_bucket", (), lambda v, s: NOTHING if v else Lost("always on: images go into buckets of their shape")
    ),
    *needless("buckets follow from the images' shapes", "min_ar max_ar num_ar_buckets"),
    never("ar_buckets", "buckets follow from the images' shapes and data.bucket_step"),
    turned("frame_buckets", (), lambda v, s: NOTHING),
    never("size_buckets", "buckets follow from the images' shapes and data.bucket_step"),
    turned("control_path", "set.control", unless_off),
    turned("mask_path", ("set.masks", "set.mask_folder"), _masks),
    turned("shuffle_tags", "set.captions.shuffle", switched(True)),
    turned("cache_shuffle_num", ("set.captions.shuffle", "set.captions.variants"), _shuffled),
    turned("cache_shuffle_delimiter", "set.captions.separator", unless_off),
    turned("caption_prefix", "set.captions.prefix", unless_off),
    turned("validation", "set.validation", switched(True)),
    turned("skip_empty_caption", (), lambda v, s: NOTHING),
]

PROGRAM: Final = Program("diffusion-pipe", _is_mine, _read, _ROWS, _SET_ROWS)
