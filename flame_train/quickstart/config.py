"""The config of a quickstart: sized for two CPU cores and a minute, so each line that is not the default says why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, Literal

from flame_train.config.keys import keys
from flame_train.config.prompts import Prompt
from flame_train.config.render import commented, flat, toml_value
from flame_train.config.repeated import CheckpointSection, SampleSection, ValidationSection
from flame_train.config.schema import Config, DataSection, LoraSection, ModelSection
from flame_train.config.training_sections import OptimizerSection, OutputSection, ScheduleSection, TrainSection
from flame_train.data.sets import DataSet
from flame_train.models.common.small import QuickstartSpec

_DRAWN_IN: Final = 20  # steps from noise to an image

_VALIDATIONS: Final = 8
HELD_OUT: Final = "held-out"
"""The folder of images that are never trained on."""

_HEAD: Final = """\
NOT A CONFIG TO COPY. A small model is taught in a minute here, by settings that would harm a real one.
For a run of your own: flame-train init {family} --preset character|style|concept -o my.toml
Lines that begin their comment with <-- differ from the defaults, and say why."""

_REASONS: Final[Mapping[str, str]] = {
    "model.checkpoint": "the small base; yours is the file of a published model",
    "data.sets": "drawings, made by quickstart, and others that are never trained on",
    "data.resolution": "what the small base was made with; a published model wants its own, such as 1024",
    "data.batch_size": "such small images leave room",
    "data.bucket_step": "so that the small images keep their shapes",
    "lora.targets": "only the layers that read the caption: enough for a style of drawings, too few for photographs",
    "lora.alpha": "as the rank, so that the update is not scaled",
    "optimizer.lr": "far too high for a published model; the run has few steps",
    "schedule.warmup_steps": "the run has few steps",
    "loss.weighting": "with loss.snr_gamma",
    "loss.snr_gamma": "nearly pure noise counts, where the background is decided; 5 is usual for a published model",
    "train.steps": "enough for drawings; 1000 to 3000 are usual",
    "train.precision": "the CPU computes in fp32; a GPU in bf16",
    "train.ema_decay": "the mean over the last ten steps keeps more of what the base knew",
    "checkpoint.every": "a checkpoint in the middle of the run",
    "checkpoint.keep": "both of them",
    "sample.every": "one grid before training and one after it",
    "sample.prompts": "those of before-after.png",
    "sample.steps": "enough for drawings",
    "sample.guidance_scale": "of the small base",
    "sample.seed": "from these on the style is whole; about one seed in four gives it other backgrounds",
    "validation.every": "the curve of a short run; its loss has no weights, and falls",
    "validation.timesteps": "enough for a curve",
    "output.dir": "beside this file",
}


def config_text(folder: Path, device: str, family: str, lesson: QuickstartSpec, unsupported: Collection[str]) -> str:
    """Returns the text of config.toml, with every key.

    Args:
        lesson: what is taught, and how.
        unsupported: the paths of keys that the family lacks.
    """
    config = lesson_config(folder, device, lesson)
    values, plain = flat(config), flat(Config())
    notes = {
        path: f"<-- {_REASONS[path]}; default {toml_value(plain.get(path, keys()[path].default))}"
        for path, value in values.items()
        if value != plain.get(path, keys()[path].default)
    }
    first, *more = _HEAD.format(family=family).splitlines()
    title = "\n# ".join([first, *more])
    return commented(config, title, unsupported, notes)


def lesson_config(folder: Path, device: str, lesson: QuickstartSpec) -> Config:
    """Returns the settings of a lesson in `folder`."""
    prompts = (*lesson.prompts, *lesson.known_prompts)
    return Config(
        model=ModelSection(checkpoint=str(folder / "base.safetensors")),
        data=DataSection(
            sets=(
                DataSet(path=str(folder / "images"), folder_repeats=True),
                DataSet(path=str(folder / HELD_OUT / "new"), validation=True),
            ),
            resolution=lesson.resolution,
            bucket_step=lesson.bucket_step,
            batch_size=lesson.batch_size,
        ),
        lora=LoraSection(rank=16, alpha=16.0, targets=lesson.targets),
        optimizer=OptimizerSection(lr=lesson.lr),
        loss=lesson.loss,
        schedule=ScheduleSection(warmup_steps=5),
        train=TrainSection(steps=lesson.steps, precision=_precision(device), ema_decay=lesson.ema_decay),
        checkpoint=CheckpointSection(every=lesson.steps // 2, keep=2),
        sample=SampleSection(
            every=lesson.steps if prompts else 0,
            prompts=tuple(Prompt(text=text) for text in prompts),
            steps=_DRAWN_IN,
            guidance_scale=5.0,
            seed=lesson.seed,
        ),
        validation=ValidationSection(every=max(lesson.steps // _VALIDATIONS, 1), timesteps=2),
        output=OutputSection(dir=str(folder / "run")),
    )


def _precision(device: str) -> Literal["fp32", "bf16"]:
    return "fp32" if device == "cpu" else "bf16"
