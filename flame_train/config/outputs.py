"""Where a run is kept, and what its log has: `[output]` and `[log]`."""

from __future__ import annotations

from typing import Literal

from flame_train.settings import Section, field


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
