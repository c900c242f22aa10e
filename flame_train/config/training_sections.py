"""How a run turns gradients into updates, `[optimizer]` to `[train]`, what it may take, and where it is kept."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field

from flame_train.errors import ConfigError
from flame_train.optimizers import OPTIMIZERS
from flame_train.schedules import SCHEDULES
from flame_train.settings import Section, choices, field

AUTO: Final = "auto"
_UNITS: Final = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
_SIZE: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class MemorySection(Section):
    """The memory of the GPU that a run may take."""

    budget: str = field(
        "",
        'the most that the run takes of the GPU, such as "12 GiB"; the plan then chooses what the config leaves open; '
        "auto: what is free; empty: no limit, and nothing is chosen",
        free=True,  # what was chosen for it is in the run folder's config
        aka=("memory", "vram", "max_vram", "gpu_memory_limit"),
    )


def bytes_of(size: str) -> int:
    """Returns the bytes of a size such as "12 GiB", "12.5GiB" or "12 GB", which are 12 * 10^9.

    Raises ConfigError, without the key, for another text and for one that is not above 0.
    """
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigError(f'expected a size such as "12 GiB", or "auto", got "{size}"')
    number, unit = match.groups()
    if not unit:
        raise ConfigError(f'expected a size with its unit, got "{size}": say "{number} GiB" (1 GiB is 1.07 GB)')
    known = {name.lower(): name for name in _UNITS}
    if unit.lower() not in known:
        raise ConfigError(f'expected one of {", ".join(_UNITS)} behind the number, got "{size}"')
    if float(number) <= 0:
        raise ConfigError(f'expected a size above 0, or "" for no limit, got "{size}"')
    return int(float(number) * _UNITS[known[unit.lower()]])


def budget_problem(budget: str) -> str | None:
    """Says what is wrong with `memory.budget`; None if nothing is."""
    if budget in ("", AUTO):
        return None
    try:
        bytes_of(budget)
    except ConfigError as error:
        return str(error)
    return None


LONGEST_RUN = 10**8
"""Steps of the longest run that a config may ask for."""


@choices(OPTIMIZERS)
class OptimizerSection(Section):
    """How gradients become updates."""

    lr: float = field(1e-4, "peak learning rate", gt=0, le=10, aka=("learning_rate", "unet_lr", "max_lr"))
    lora_plus_ratio: float = field(
        1.0,
        "factor on the up matrices' rate (LoRA+, arXiv 2402.12354); 1: off, 16 is the paper's",
        gt=0,
        le=1000,
        aka=("loraplus_lr_ratio", "loraplus_unet_lr_ratio"),
    )


@choices(SCHEDULES)
class ScheduleSection(Section):
    """How the learning rate moves over the run."""

    warmup_steps: int = field(0, "linear rise from 0", unit="steps", ge=0, aka=("lr_warmup_steps",))
    warmup: float = field(
        0.0, "the same rise as a share of the run; 0: schedule.warmup_steps", ge=0, lt=1, aka=("warmup_ratio",)
    )
    min_lr: float = field(0.0, "learning rate at the end of the decay", ge=0, le=10)

    def warmup_of(self, steps: int) -> int:
        """Gives the number of warm-up steps in a run of `steps`; a share's is rounded, and leaves one step at least."""
        return min(round(self.warmup * steps), steps - 1) if self.warmup else self.warmup_steps


class GradientSection(Section):
    """Changes of gradients before the optimizer gets them."""

    accumulation: int = field(
        1, "micro-batches in one update", ge=1, aka=("gradient_accumulation_steps", "accumulation_steps")
    )
    clip_norm: float = field(1.0, "largest total norm; 0: off", ge=0, aka=("max_grad_norm", "clip_grad_norm"))
    normalize: bool = field(False, "scale shorter gradients, too, to gradient.clip_norm: only the direction counts")
    clip_value: float = field(0.0, "largest absolute value of an entry; 0: off", ge=0)
    noise_std: float = field(0.0, "std of Gaussian noise added at step 0; 0: off", ge=0, le=1000)
    noise_decay: float = field(0.55, "its variance falls as 1 / (1 + step)^noise_decay (arXiv 1511.06807)", ge=0)
    checkpointing: Literal["off", "full", "offload", "mlp"] = field(
        "off",
        "activations recomputed in the backward pass: less memory, slower. full: whole blocks; offload: their inputs "
        "wait in host memory too; mlp: the widest layers alone",
        free=True,
        aka=("gradient_checkpointing", "cpu_offload_checkpointing", "recompute"),
    )
    checkpoint_blocks: tuple[str, ...] = field(
        (),
        "globs over block names (output_blocks.*, single_blocks.1?): only these are recomputed; empty: all",
        free=True,
        aka=("recompute_only",),
    )
    all_reduce: Literal["fp32", "bf16"] = field(
        "fp32", "number format in which several processes add up gradients; bf16: half the bytes, rounded at each sum"
    )


class TrainSection(Section):
    """The run."""

    steps: int = field(
        2000,
        "length of the run in optimizer updates",
        unit="steps",
        ge=1,
        le=LONGEST_RUN,
        aka=("max_train_steps", "max_steps", "num_steps", "total_steps"),
    )
    epochs: int = field(
        0,
        "length of the run in passes through the dataset, in place of train.steps; 0: train.steps says it",
        unit="epochs",
        ge=0,
        le=10**6,
        free=True,  # the weights depend on train.steps, which is counted from it
        aka=("max_train_epochs", "num_train_epochs"),
    )
    seed: int = field(42, "seed: every random number follows from it", ge=0, le=2**63 - 1)
    precision: Literal["fp32", "bf16", "fp16"] = field(
        "bf16",
        "number format of the base model; adapters stay fp32",
        aka=("mixed_precision", "dtype"),
    )
    loss_scale: Literal["dynamic"] | Annotated[float, Field(ge=1, le=2**24)] = field(
        "dynamic",
        "factor on the loss in fp16, against gradients too small for it; dynamic: halved at an overflow, doubled later",
    )
    loss_scale_init: float = field(65536.0, "first value of a dynamic loss scale", ge=1, le=2**24)
    loss_scale_interval: int = field(
        2000, "steps without an overflow after which a dynamic loss scale doubles", unit="steps", ge=1
    )
    ema_decay: float = field(
        0.0,
        "the LoRA and the grids hold a moving average of the weights; 0: off, 0.99 to 0.9999 are usual",
        ge=0,
        lt=1,
        aka=("ema", "use_ema"),
    )
    continue_from: str = field(
        "",
        "a run's folder: a new run begins with its last LoRA and the optimizer's state; empty: none",
        place=True,
        aka=("resume",),
    )
    deterministic: bool = field(True, "same seed, same bytes on the same device; false is 1 to 3 % faster on a GPU")


class LogSection(Section):
    """Further values in the log."""

    gradients_every: int = field(
        0,
        "interval at which the gradient norm of each block goes into log.jsonl; 0: never",
        unit="steps",
        ge=0,
        free=True,
    )
    images_every: int = field(
        100,
        "interval at which the images of the highest and lowest running loss go into log.jsonl; images.json has all "
        "of them; 0: losses of images are not kept",
        unit="steps",
        ge=0,
        free=True,
    )


class OutputSection(Section):
    """Where the run is kept."""

    dir: str = field("", "the run folder; required", free=True, place=True, aka=("output_dir", "training_folder"))
    remote: str = field(
        "",
        "address to which the run folder is copied while it trains, and from which another machine goes on, such as "
        "s3://bucket/folder; empty: none",
        free=True,
    )
    name: str = field(
        "",
        "the LoRA's file, NAME.safetensors; in checkpoints NAME-000500.safetensors; empty: lora.safetensors in both",
        free=True,
        aka=("output_name",),
    )
    format: Literal["kohya", "diffusers", "both"] = field(
        "kohya",
        "names in the LoRA's file; both: kohya's there, and diffusers' in NAME.diffusers.safetensors",
        free=True,
        aka=("save_model_as",),
    )
    precision: Literal["bf16", "fp16", "fp32"] = field(
        "bf16",
        "number format of the LoRA's matrices in its file; a run is continued from fp32 all the same",
        free=True,
        aka=("save_precision", "save_dtype"),
    )
    title: str = field(
        "", "its title in its metadata; empty: its name, or the run folder's", free=True, aka=("metadata_title",)
    )
    author: str = field("", "its author, in its metadata", free=True, aka=("metadata_author",))
    trigger: str = field(
        "",
        "the words that call it, in its metadata alone; empty: captions.trigger",
        free=True,
        aka=("metadata_trigger_phrase",),
    )
    tensorboard: bool = field(
        False, "also write TensorBoard events", free=True, aka=("log_with", "report_to", "logging_dir")
    )
    wandb: str = field(
        "",
        "the project at Weights & Biases to which curves, sample images and the config are sent; empty: none",
        free=True,
        aka=("wandb_project", "log_tracker_name", "tracker_project_name", "project_name"),
    )
    hub: str = field(
        "",
        "the repository on the Hugging Face hub, owner/name, to which the LoRA, a model card and the last samples are "
        "uploaded at the end; empty: none",
        free=True,
        aka=("hf_repo_id", "huggingface_repo_id", "hub_model_id"),
    )
    hub_public: bool = field(
        False,
        "whether everybody may see that repository; false: it is made private, and a public one is refused",
        free=True,
    )
