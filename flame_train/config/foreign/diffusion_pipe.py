"""diffusion-pipe's TOML, and the dataset TOML that it names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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
    Changed,
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

_FAMILIES: Final = MappingProxyType(
    {
        **{name: name for name in ("sdxl", "sd3", "flux", "chroma", "flux2", "krea2", "anima")},
        "z_image": "zimage",
        "qwen_image": "qwenimage1",
    }
)
_FLOW: Final = tuple(family for family in _FAMILIES.values() if family != "sdxl")
_SPEED: Final = "it changes how fast a run is, and what it shows"
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
        raise ConfigError(
            f"{reading.place(('model', 'type'))}: type = {model['type']}: expected one of {', '.join(_FAMILIES)}"
        )
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
    return Source(_FAMILIES[model["type"]], settings, sets + _held_out(reading, settings, notes), notes)


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
    """The distribution of noise levels; `shift` wins over `flux_shift`, which is the family's own."""
    shift = source.get("model.shift") or (0.0 if source.get("model.flux_shift") else 1.0)
    std = float(source.get("model.sigmoid_scale", 1.0)) if value == "logit_normal" else 1.0
    known = {"logit_normal": "logit_normal", "uniform": "uniform"}
    return sampled(known[value], shift, std) if value in known else Lost("expected logit_normal or uniform")


def _batch(value: Any, source: Source) -> Any:
    """Images in a batch. A list has a size for each resolution; where all are one size, it is that."""
    sizes = {each[1] for each in value} if isinstance(value, list) else {value}
    if len(sizes) > 1:
        return Lost("a batch size for each resolution: a set in [[data.sets]] has one of its own")
    return sizes.pop()


def _examples(value: Any, source: Source) -> Any:
    """An interval in images as one in steps."""
    if is_off(value):
        return NOTHING
    size = _batch(source.get("image_micro_batch_size_per_gpu") or source.get("micro_batch_size_per_gpu", 1), source)
    return max(1, int(value) // (size * int(source.get("gradient_accumulation_steps", 1))))


def _schedule(value: Any, source: Source) -> Any:
    """A cosine ends at a rate of 1e-6, whatever it begins with."""
    found = schedule(value, source)
    return {"schedule.name": "cosine", "schedule.min_lr": 1e-6} if found == "cosine" else found


def _float8(value: Any, source: Source) -> Any:
    return "fp8" if "8" in str(value) else NOTHING


def _resolutions(value: Any, source: Source) -> Any:
    """Sides of squares; a pair is an area, and so the side of a square of that area."""
    sides = [side(each, source) for each in value] if isinstance(value, list) else []
    numbers = [each.value if isinstance(each, Changed) else each for each in sides]
    if not numbers or any(isinstance(each, Lost) for each in numbers):
        return Lost("expected a list of resolutions")
    found = {"set.resolution": numbers[0]} if len(numbers) == 1 else {"set.resolutions": sorted(set(numbers))}
    remarks = [each.remark for each in sides if isinstance(each, Changed)]
    return Changed(found, remarks[0]) if remarks else found


def _repeats(value: Any, source: Source) -> Any:
    """How often a folder is shown in an epoch; a number with a fraction is a weight here."""
    count = float(value)
    return {"set.repeats": int(count)} if count == int(count) and count >= 1 else {"set.weight": count}


def _encoder(value: Any, source: Source) -> Any:
    """The files of text encoders, of which these families have one."""
    paths = [str(each["path"]) for each in value if "path" in each]
    return paths[0] if len(paths) == 1 else Lost("expected one file; name each in [text_encoders]")


def _merged(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    return value[0] if len(value) == 1 else Lost("model.training_adapter is one file; merge the others beforehand")


def _without_buckets(value: Any, source: Source) -> Any:
    if value:
        return NOTHING
    return Lost("images are cut to squares there, and keep their shape here; cut them beforehand to have the same")


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


def _text_batch(value: Any, source: Source) -> Any:
    """The batch of videos, and of images where those have none of their own."""
    return NOTHING if source.get("image_micro_batch_size_per_gpu") is not None else _batch(value, source)


def _constant(value: Any, source: Source) -> Any:
    """A rate that wins over the optimizer's and over the schedule."""
    return {"optimizer.lr": float(value), "schedule.name": "constant"}


def _shuffled_once(value: Any, source: Source) -> Any:
    """One order of the tags, drawn when captions are cached, unless cache_shuffle_num asks for more."""
    if is_off(value) or not is_off(source.get("cache_shuffle_num")):
        return NOTHING
    return {"set.captions.shuffle": True, "set.captions.variants": 1}


def _uncaptioned(value: Any, source: Source) -> Any:
    return NOTHING if value else Lost("an image without a caption is an error here: write it an empty text file")


def _one_stage(value: Any, source: Source) -> Any:
    return NOTHING if value == 1 else Lost("a run is one process on one GPU")


def _folder(value: Any, source: Source) -> Any:
    """A diffusers folder, whose transformer a file of its own replaces."""
    if source.get("model.transformer_path"):
        return Lost("for its text encoders and VAE: name them in [text_encoders] and model.vae")
    return checkpoint(value, source)


_ROWS: Final = [
    turned("model.checkpoint_path@models/sdxl.py:386", "model.checkpoint", checkpoint),
    turned("model.transformer_path@models/qwen_image.py:252", "model.checkpoint", checkpoint),
    turned("model.diffusion_model@models/base.py:641", "model.checkpoint", checkpoint),
    turned("model.diffusers_path@models/qwen_image.py:204", "model.checkpoint", _folder),
    *(
        turned(name, "model.vae", unless_off)
        for name in ("model.vae@models/base.py:551", "model.vae_path@models/cosmos_predict2.py:210")
    ),
    turned("model.text_encoders@models/base.py:577", "text_encoders.qwen3", _encoder),
    turned("model.text_encoder_path@models/qwen_image.py:202", "text_encoders.qwen3", unless_off),
    turned("model.llm_path@models/cosmos_predict2.py:249", "text_encoders.qwen3", unless_off),
    turned("model.merge_adapters@models/base.py:644", "model.training_adapter", _merged),
    turned("model.v_pred@models/sdxl.py:374", "model.prediction", switched("v")),
    turned("model.dtype@107", "train.precision", number_format),
    *(
        turned(name, "model.quantize", _float8)
        for name in ("model.transformer_dtype@109", "model.diffusion_model_dtype@111")
    ),
    turned("model.min_snr_gamma@models/sdxl.py:375", MIN_SNR, min_snr),
    turned("model.debiased_estimation_loss@models/sdxl.py:376", "loss.weighting", weighting("debiased")),
    turned("model.timestep_sample_method@models/flux.py:343", _SAMPLED, _levels, absent="logit_normal", families=_FLOW),
    never("model.timestep_sample_method", "SDXL's noise levels are even there, too"),
    *part_of(
        "model.flux_shift@models/flux.py:364 model.shift@models/flux.py:362 model.sigmoid_scale@models/flux.py:358"
    ),
    turned("model.guidance@113", "loss.guidance_scale", to_float, families=["flux"]),
    never(
        "model.bypass_guidance_embedding@models/flux.py:189",
        "Flux's guidance is always an input; loss.guidance_scale = 1 is near it",
    ),
    turned("(text encoders)", TRAINED, _encoders, absent="trained", families=["sdxl"]),
    *part_of("model.text_encoder_1_lr@models/sdxl.py:617 model.text_encoder_2_lr@models/sdxl.py:618"),
    turned("model.unet_lr@models/sdxl.py:616", "optimizer.lr", to_float),
    *(
        never(f"model.{name}", "[[lora.rules]] gives layers a rate of their own; 0 freezes them")
        for name in (
            *(f"{part}_lr@models/cosmos_predict2.py:481" for part in ("self_attn", "cross_attn", "mlp", "mod")),
        )
    ),
    turned("adapter.type@117", "lora.kind", _kind),
    turned("adapter.rank@122", ("lora.rank", "lora.alpha", "lora.full_matrix"), _rank),
    turned("adapter.decompose_factor@130", "lora.factor", lambda v, s: v if v > 0 else NOTHING),
    turned("adapter.dropout@128", "lora.dropout", unless_off),
    turned("adapter.rank_dropout@131", "lora.rank_dropout", unless_off),
    turned("adapter.init_from_existing@534", "lora.from", unless_off),
    never("adapter.exclude_modules@models/base.py:283", "lora.targets takes globs; write them by hand"),
    *needless("adapters are always fp32", "adapter.dtype@107"),
    never("adapter.fuse_adapters@models/flux.py:197", "merge them into the base with `flame-train merge`"),
    turned("(layers)", "lora.targets", _targets, absent="all"),
    turned("optimizer.type@666", "optimizer.name", optimizer),
    turned("optimizer.lr@745", "optimizer.lr", to_float),
    never("optimizer.gradient_release@422", "an update for each micro-batch; here one for the whole batch"),
    never("optimizer.beta2_half_life@658", "optimizer.betas has the decay itself: 0.5 ** (batch size / half-life)"),
    *optimizer_keys("optimizer."),
    turned("force_constant_lr@873", ("optimizer.lr", "schedule.name"), _constant),
    turned("lr_scheduler@849", ("schedule.name", "schedule.min_lr"), _schedule, absent="constant"),
    turned("warmup_steps@858", "schedule.warmup_steps", unless_off),
    turned("epochs@853", "train.epochs", to_number),
    turned("max_steps@961", "train.steps", unless_off),
    turned("image_micro_batch_size_per_gpu@408", "data.batch_size", _batch),
    turned("micro_batch_size_per_gpu@396", "data.batch_size", _text_batch),
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
    turned("save_every_n_examples@643", "checkpoint.every", _examples),
    turned("checkpoint_every_n_epochs@utils/saver.py:24", "checkpoint.every_epochs", unless_off),
    Row("checkpoint_every_n_minutes", (), _minutes, at="utils/saver.py:39"),
    Row("pipeline_stages", (), _one_stage, at="632"),
    swapped("blocks_to_swap@576", "activation_checkpointing"),
    *part_of("eval_datasets@437"),
    turned("eval_every_n_epochs@139", "validation.every_epochs", _evaluated),
    turned("eval_every_n_steps@138", "validation.every", _evaluated),
    turned("eval_every_n_examples@646", "validation.every", lambda v, s: _evaluated(_examples(v, s), s)),
    turned("uncond_fraction@288", "data.caption_dropout", unless_off),
    never("resume_from_checkpoint@303", "train.continue_from names the run to continue"),
    never("monitoring.enable_wandb@561", "set output.wandb to a project"),
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
    turned("num_repeats@utils/dataset.py:735", ("set.repeats", "set.weight"), _repeats),
    turned("resolutions@utils/dataset.py:882", ("set.resolution", "set.resolutions"), _resolutions),
    turned("enable_ar_bucket@utils/dataset.py:732", (), _without_buckets, absent=False),
    *needless(
        "buckets follow from the images' shapes",
        "min_ar@utils/dataset.py:502 max_ar@utils/dataset.py:503 num_ar_buckets@utils/dataset.py:504 "
        "frame_buckets@utils/dataset.py:508",
    ),
    never("ar_buckets@utils/dataset.py:499", "buckets follow from the images' shapes and data.bucket_step"),
    never("size_buckets@utils/dataset.py:460", "buckets follow from the images' shapes and data.bucket_step"),
    turned("control_path@utils/dataset.py:479", "set.control", unless_off),
    turned("mask_path@utils/dataset.py:478", ("set.masks", "set.mask_folder"), _masks),
    never("default_mask_file@utils/dataset.py:481", "an image without a mask counts everywhere; write it one"),
    turned("cache_shuffle_num@utils/dataset.py:473", ("set.captions.shuffle", "set.captions.variants"), _shuffled),
    turned("shuffle_tags@utils/dataset.py:761", ("set.captions.shuffle", "set.captions.variants"), _shuffled_once),
    turned("cache_shuffle_delimiter@utils/dataset.py:476", "set.captions.separator", unless_off),
    turned("caption_prefix@utils/dataset.py:734", "set.captions.prefix", unless_off),
    turned("validation", "set.validation", switched(True)),
    turned("skip_empty_caption@utils/dataset.py:484", (), _uncaptioned),
    never("online_captions@utils/dataset.py:515", "captions stand in text files or metadata.jsonl here"),
    never("subsample_ratio@utils/dataset.py:985", "train.steps ends an epoch early; repeats and weight choose images"),
    *needless("the order of images is always shuffled", "shuffle_metadata@utils/dataset.py:736"),
]

PROGRAM: Final = Program(
    "diffusion-pipe",
    _is_mine,
    _read,
    _ROWS,
    _SET_ROWS,
    "https://github.com/tdrussell/diffusion-pipe/blob/8f83dbf/train.py",
)
