"""diffusion-pipe's TOML, and the dataset TOML that it names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.foreign.read_rows import read_table
from flame_train.errors import ConfigError
from flame_train.families import named_by

from .clips import OF_DIFFUSION_PIPE, has_clips, unless_sized
from .conversions import (
    OPTIMI,
    checkpoint,
    format_of_comfyui,
    innermost,
    number,
    of_library,
    sampled,
    sampled_as_flux,
    schedule,
    side,
    swapped,
    trained,
)
from .table import NOTHING, Changed, Convert, Lost, Program, Reading, Setting, Source, Tree, is_off, no_file

_FAMILIES: Final = named_by("diffusion-pipe")


def _is_mine(tree: Tree) -> bool:
    model = tree.get("model")
    if isinstance(tree.get("directory"), list):
        return True
    return isinstance(model, Mapping) and "type" in model and ("dataset" in tree or "adapter" in tree)


def _read(reading: Reading) -> Source:
    tree = reading.tree
    if "directory" in tree:
        return Source("", {}, folders_of(reading))
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
        sets = folders_of(other) if other else []
        if other is None:
            notes.append(no_file("dataset", named, "its folders are"))
    return Source(_FAMILIES[model["type"]], settings, sets + held_out(reading, settings, notes), notes)


def held_out(reading: Reading, settings: Mapping[str, Setting], notes: list[str]) -> list[dict[str, Setting]]:
    """Returns the folders of eval_datasets, in files of their own."""
    sets: list[dict[str, Setting]] = []
    named = settings.get("eval_datasets", Setting([], ""))
    for one in named.value:
        name = str(one.get("config", "") if isinstance(one, Mapping) else one)
        other = reading.beside(name)
        if other is None:
            notes.append(no_file("eval_datasets", Setting(name, named.place), "its folders are"))
        else:
            sets += [each | {"validation": Setting(True, named.place)} for each in folders_of(other)]
    return sets


def folders_of(reading: Reading) -> list[dict[str, Setting]]:
    shared = reading.flat({name: value for name, value in reading.tree.items() if name != "directory"})
    folders = reading.tree.get("directory", [])
    return [
        shared | reading.flat(one, ("directory", f"[{i}]"))
        for i, one in enumerate(folders if isinstance(folders, list) else [])
    ]


def rank(value: Any, source: Source) -> Any:
    """Its alpha is the rank; in LoKr a rank above every layer's means matrices that are not decomposed."""
    if source.get("adapter.type") == "lokr" and value >= 4096:
        return {"lora.full_matrix": True}
    return {"lora.rank": int(value), "lora.alpha": float(value)}


def targets(value: Any, source: Source) -> Any:
    """Converts the linear layers of the blocks; of Krea 2 those over the text too."""
    return source.fact("diffusion_pipe_layers") or ["full"]


def levels(value: Any, source: Source) -> Any:
    """Converts the distribution of noise levels; `shift` wins over `flux_shift`."""
    shift = source.get("model.shift") or (0.0 if source.get("model.flux_shift") else 1.0)
    std = float(source.get("model.sigmoid_scale", 1.0)) if value == "logit_normal" else 1.0
    known = {"logit_normal": "logit_normal", "uniform": "uniform"}
    if value not in known:
        return Lost("expected logit_normal or uniform")
    return sampled(known[value], shift, std) if shift else sampled_as_flux(known[value], source, std)


def batch(value: Any, source: Source) -> Any:
    """Images in a batch. A list has a size for each resolution; where all are one size, it is that."""
    sizes = {each[1] for each in value} if isinstance(value, list) else {value}
    if len(sizes) > 1:
        return Lost("a batch size for each resolution: a set in [[data.sets]] has one of its own")
    return sizes.pop()


def examples(value: Any, source: Source) -> Any:
    """Converts an interval in images as one in steps, by the first batch size, not by that of images (train.py:632)."""
    if is_off(value):
        return NOTHING
    named = source.get("micro_batch_size_per_gpu", 1)
    size = named[0][1] if isinstance(named, list) else named
    return max(1, int(value) // (size * int(source.get("gradient_accumulation_steps", 1))))


def scheduled(value: Any, source: Source) -> Any:
    """Converts a cosine ends at a rate of 1e-6, whatever it begins with."""
    answer = schedule(value, source)
    return {"schedule.name": "cosine", "schedule.min_lr": 1e-6} if answer == "cosine" else answer


def float8(value: Any, source: Source) -> Any:
    return "fp8" if "8" in str(value) else NOTHING


def resolutions(value: Any, source: Source) -> Any:
    """Sides of squares; a pair is an area, and so the side of a square of that area."""
    sides = [side(each, source) for each in value] if isinstance(value, list) else []
    numbers = [each.value if isinstance(each, Changed) else each for each in sides]
    if not numbers or any(isinstance(each, Lost) for each in numbers):
        return Lost("expected a list of resolutions")
    keys = {"set.resolution": numbers[0]} if len(numbers) == 1 else {"set.resolutions": sorted(set(numbers))}
    remarks = [each.remark for each in sides if isinstance(each, Changed)]
    return Changed(keys, remarks[0]) if remarks else keys


def repeats(value: Any, source: Source) -> Any:
    """Converts how often a folder is shown in an epoch; a number with a fraction is a weight here."""
    count = float(value)
    return {"set.repeats": int(count)} if count == int(count) and count >= 1 else {"set.weight": count}


def encoder(value: Any, source: Source) -> Any:
    """Converts the files of text encoders, of which these families have one."""
    paths = [str(each["path"]) for each in value if "path" in each]
    if len(paths) != 1:
        return Lost("expected one file; name each in [text_encoders]")
    dev = source.family == "flux2" and innermost(paths[0], "qwen", "mistral") == "mistral"
    return {f"text_encoders.{'mistral' if dev else 'qwen3'}": paths[0]}


def text_model(value: Any, source: Source) -> Any:
    """Converts the file of a text encoder: of Wan UMT5's."""
    return {f"text_encoders.{'t5' if source.family == 'wan' else 'qwen3'}": str(value)}


def wan_folder(value: Any, source: Source) -> Any:
    """Converts Wan's own folder, whose autoencoder and text encoder are pickles."""
    if source.get("model.transformer_path"):
        return Lost("its autoencoder is a pickle: name ComfyUI's wan2.2_vae in model.vae")
    remark = "its autoencoder and UMT5 are pickles: name ComfyUI's files in model.vae and text_encoders.t5"
    found = checkpoint(value, source)
    return found if isinstance(found, Lost) else Changed(str(value), remark)


def merged(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    return value[0] if len(value) == 1 else Lost("model.training_adapter is one file; merge the others beforehand")


def without_buckets(value: Any, source: Source) -> Any:
    if value:
        return NOTHING
    return Lost("images are cut to squares there, and keep their shape here; cut them beforehand to have the same")


def minutes(value: Any, source: Source) -> Any:
    return (
        NOTHING
        if is_off(value)
        else Lost("an interval in minutes: checkpoint.every counts steps, checkpoint.every_epochs epochs")
    )


def shuffled(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else {"set.captions.shuffle": True, "set.captions.variants": value}


def encoders(value: Any, source: Source) -> Any:
    """Trains both CLIPs of SDXL, at the optimizer's rate where they have none of their own."""
    rate = source.get("optimizer.lr")
    rates = {name: source.get(f"model.text_encoder_{i}_lr", rate) for i, name in ((1, "clip_l"), (2, "clip_g"))}
    return trained(rates, source.get("model.unet_lr", rate), "attention+mlp")


def rate_of_layers(value: Any, source: Source) -> Any:
    """Tells a rate of some layers; 0 freezes them there."""
    same = value is None or number(value) == number(source.get("optimizer.lr"))
    return (
        NOTHING if same else Lost("[[lora.rules]] gives layers a rate of their own, and lora.targets leaves some out")
    )


def text_batch(value: Any, source: Source) -> Any:
    """Converts the batch of videos, and of images where those have none of their own."""
    if source.get("image_micro_batch_size_per_gpu") is None:
        return batch(value, source)
    return Lost("of clips; a set in [[data.sets]] has a batch size of its own") if has_clips(source) else NOTHING


def constant(value: Any, source: Source) -> Any:
    """Converts a rate that wins over the optimizer's and over the schedule."""
    return {"optimizer.lr": float(value), "schedule.name": "constant"}


def shuffled_once(value: Any, source: Source) -> Any:
    """Converts one order of the tags, drawn when captions are cached, unless cache_shuffle_num asks for more."""
    if is_off(value) or not is_off(source.get("cache_shuffle_num")):
        return NOTHING
    return {"set.captions.shuffle": True, "set.captions.variants": 1}


def uncaptioned(value: Any, source: Source) -> Any:
    return NOTHING if value else Lost("an image without a caption is an error here: write it an empty text file")


def one_stage(value: Any, source: Source) -> Any:
    return NOTHING if value == 1 else Lost("a run is one process on one GPU")


def folder(value: Any, source: Source) -> Any:
    """Converts a diffusers folder, whose transformer a file of its own replaces."""
    if source.get("model.transformer_path"):
        return Lost("for its text encoders and VAE: name them in [text_encoders] and model.vae")
    return checkpoint(value, source)


_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "model.diffusers_path": folder,
        "model.text_encoders": encoder,
        "model.llm_path": text_model,
        "model.ckpt_path": wan_folder,
        "model.merge_adapters": merged,
        "float8": float8,
        "model.timestep_sample_method": levels,
        **OF_DIFFUSION_PIPE,
        "(text encoders)": encoders,
        "adapter.rank": rank,
        "adapter.decompose_factor": lambda v, s: v if v > 0 else NOTHING,
        "rate of layers": rate_of_layers,
        "rate of the text's adapter": lambda v, s: (
            NOTHING if number(v) == 0 else Lost("the adapter between encoder and blocks gets none here")
        ),
        "(layers)": targets,
        "(optimizer's own)": of_library("optimizer.type", "optimizer.", {"adamw_optimi": OPTIMI}),
        "force_constant_lr": constant,
        "lr_scheduler": scheduled,
        "image_micro_batch_size_per_gpu": batch,
        "micro_batch_size_per_gpu": text_batch,
        "activation_checkpointing": lambda v, s: NOTHING if not v else "offload" if v == "unsloth" else "full",
        "pseudo_huber_c": lambda v, s: {"loss.kind": "huber", "loss.huber_c": float(v)},
        "(output format)": lambda v, s: format_of_comfyui(s),
        "save_every_n_examples": examples,
        "checkpoint_every_n_minutes": minutes,
        "pipeline_stages": one_stage,
        "blocks_to_swap": swapped("activation_checkpointing"),
        "eval_every_n_examples": lambda v, s: examples(v, s) if s.get("eval_datasets") else NOTHING,
        "monitoring.enable_wandb": lambda v, s: s.get("monitoring.wandb_tracker_name", NOTHING) if v else NOTHING,
        "num_repeats": repeats,
        "resolutions": unless_sized(resolutions),
        "enable_ar_bucket": unless_sized(without_buckets),
        "cache_shuffle_num": shuffled,
        "shuffle_tags": shuffled_once,
        "skip_empty_caption": uncaptioned,
    }
)

PROGRAM: Final = Program(
    "diffusion-pipe",
    _is_mine,
    _read,
    cache(partial(read_table, "diffusion_pipe", "diffusion-pipe", _OWN)),
    "https://github.com/tdrussell/diffusion-pipe/blob/8f83dbf/train.py",
)
