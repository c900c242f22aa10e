"""What a run does again and again, after so many steps or epochs: checkpoints, sample images and validations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pydantic import field_validator

from flame_train.config.prompts import Prompt
from flame_train.data.clips import MAX_FRAMES
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.settings import Section, choices, field, one_or_several

_interval = partial(field, unit="steps", ge=0, free=True)
"""A key that says after how many steps something is done again."""

_epochs = partial(field, unit="epochs", ge=0, le=10**6, free=True)
"""A key that says after how many epochs something is done again, in place of one that says after how many steps."""


class Repeated(Section):
    """A section of something that is done again and again, after so many steps or so many epochs."""

    every: int
    every_epochs: int

    @property
    def repeats(self) -> bool:
        """Whether it is done at all."""
        return bool(self.every or self.every_epochs)

    def is_due(self, step: int, epoch: Callable[[int], float]) -> bool:
        """Says whether it is done after `step`; `epoch` says how many epochs have passed after a step.

        An epoch that ends within a step counts after that step.
        """
        if self.every:
            return step % self.every == 0
        return bool(self.every_epochs) and epoch(step) // self.every_epochs > epoch(step - 1) // self.every_epochs


class CheckpointSection(Repeated):
    """The checkpoints from which a stopped run continues."""

    every: int = _interval(
        500,
        "interval between checkpoints; 0: only at the end and when stopped",
        aka=("save_every_n_steps", "checkpointing_steps", "save_every"),
    )
    every_epochs: int = _epochs(
        0, "interval between checkpoints, in place of checkpoint.every", aka=("save_every_n_epochs",)
    )
    keep: int = field(
        3,
        "newest checkpoints that stay; 0: the LoRA of every one, and the newest three whole",
        ge=0,
        free=True,
        aka=("checkpoints_total_limit", "max_step_saves_to_keep"),
    )


@choices(SAMPLERS)
class SampleSection(Repeated):
    """Images made during the run."""

    every: int = _interval(250, "interval between grids; 0: none", aka=("sample_every_n_steps", "sample_every"))
    every_epochs: int = _epochs(
        0, "interval between grids, in place of sample.every", aka=("sample_every_n_epochs", "validation_epochs")
    )
    model: str = field(
        "",
        "a checkpoint of the base's shapes that sample images are drawn with, such as the distilled model of a base; "
        "its weights wait in host memory; empty: the base itself",
        free=True,
        place=True,
        aka=("sample_model", "preview_model"),
    )
    first: bool = field(
        True,
        "a grid before the first step, to compare with; with sample.model a second one of the base itself",
        free=True,
        aka=("sample_at_first", "sample_first"),
    )
    prompts: tuple[Prompt, ...] = field(
        (),
        "prompts of the sample images, one each; empty: no grids. Strings, also with --n --w --h --d --l --s as kohya "
        "has them, or tables "
        "[[sample.prompts]] with text, negative, seed, width, height, steps, guidance_scale, sampler, strength, "
        "control",
        free=True,
        aka=("validation_prompt",),
    )
    prompt_file: str = field(
        "",
        "file with further prompts, as kohya's trainers read it: .txt, one a line, .toml or .json; empty: none",
        free=True,
        place=True,
        aka=("sample_prompts",),
    )
    negative: str = field("", "negative prompt; needs classifier-free guidance", free=True, aka=("negative_prompt",))
    control: tuple[str, ...] = field(
        (),
        "files of images that the model looks at: images to edit, the same for every prompt without control of its own",
        free=True,
        place=True,
    )
    steps: int = field(
        0, "sampler steps; 0: the model's own", ge=0, le=1000, free=True, aka=("num_inference_steps", "sample_steps")
    )
    guidance_scale: float = field(
        0.0,
        "scale of classifier-free guidance, 1: off; for Flux dev the scale that the model gets; 0: the model's own",
        ge=0,
        le=1000,
        free=True,
        aka=("cfg_scale", "guidance"),
    )
    spacing: Literal["auto", "leading", "trailing"] = field(
        "auto",
        "timesteps of models with a noise schedule: leading, as SD 1.5 and SDXL are published, or trailing, which "
        "begins at pure noise as Lightning, Turbo and Hyper-SD want it; auto: trailing with loss.zero_terminal_snr or "
        "where the checkpoint's folder says so, else leading",
        free=True,
        aka=("timestep_spacing",),
    )
    seed: int = field(42, "seed of the first image; the next has the next", ge=0, le=2**63 - 1, free=True)
    width: int = field(
        0,
        "image width; 0: data.resolution, or that of the first control image",
        unit="pixels",
        ge=0,
        le=8192,
        multiple_of=8,
        free=True,
    )
    height: int = field(
        0,
        "image height; 0: data.resolution, or that of the first control image",
        unit="pixels",
        ge=0,
        le=8192,
        multiple_of=8,
        free=True,
    )

    frames: int = field(
        1,
        "frames of a sample; more than one make it a clip (Wan)",
        unit="frames",
        ge=1,
        le=MAX_FRAMES,
        free=True,
        aka=("sample_frames", "video_length"),
    )
    fps: int = field(
        0, "frames a second of samples that are clips; 0: the model's", unit="frames/s", ge=0, le=120, free=True
    )

    @field_validator("control", mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        return one_or_several(value)


class ValidationSection(Repeated):
    """The loss on images that are held out: sets with `validation = true`, or a share of all."""

    every: int = _interval(100, "interval between validations, if images are held out; 0: none", aka=("eval_every",))
    every_epochs: int = _epochs(
        0, "interval between validations, in place of validation.every", aka=("validate_every_n_epochs", "eval_epochs")
    )
    fraction: float = field(
        0.0,
        "share of the images that is held out, at least one image, chosen by hashes; 0: none but the sets",
        ge=0,
        lt=1,
        aka=("validation_split", "eval_split"),
    )
    timesteps: int = field(4, "noise levels at which each image is measured, evenly spread", ge=1, le=100, free=True)
    patience: int = field(0, "validations without a lower loss after which the run ends; 0: never", ge=0, free=True)
