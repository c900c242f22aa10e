"""`flame-train quickstart`: makes a dataset and a base model, and trains a LoRA on them, in about a minute.

SDXL's base model is the small one of the package (see `models.common.small`), which generates coloured shapes from
captions. Ten images teach it a new style under a new name. Images of what it knows keep
it from forgetting that. The other families' bases have the published structure and random weights. They show that
training works; their images are noise. The config is the commented one that `init` writes.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from flame_train.adapters.attach import attach_factors
from flame_train.adapters.formats import from_file
from flame_train.config.keys import keys
from flame_train.config.load import load
from flame_train.config.prompts import Prompt
from flame_train.config.render import commented, flat, toml_value
from flame_train.config.repeated import CheckpointSection, SampleSection, ValidationSection
from flame_train.config.schema import Config, DataSection, LoraSection, LossSection, ModelSection
from flame_train.config.training_sections import OptimizerSection, OutputSection, ScheduleSection, TrainSection
from flame_train.data.sets import DataSet
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import disk_errors, make_folder
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.errors import ConfigError, EnvironmentFault, OutputError, shown
from flame_train.models.common.model import Example
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.registry import FAMILIES, Family
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.encode.encode import encode
from flame_train.run.plan.encoding import cache_folder
from flame_train.run.plan.plan import Plan, make_plan
from flame_train.training.session import Session
from flame_train.training.validation import HeldOut, Validator

from .drawings import Maker, scenes, tiles, write_images
from .page import Row, dataset_images, grid_images, write_page

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


_LOG = logging.getLogger(__name__)

_NEW: Final = 10  # images of the style that is taught
_PAGE: Final = """, samples/
  before-after.png    what was taught, and the same prompts from the same noise before and after training"""
_HELD_OUT: Final = {"new": 24, "known": 48}  # images of each kind
_LEVELS: Final = 4  # noise levels at which a held-out image is measured
_SEED: Final = 2307


class _Images(NamedTuple):
    """A part of the dataset: its folder, number of images, generator, seed and description."""

    folder: str
    number: int
    make: Maker
    seed: int
    what: str


def _images(lesson: QuickstartSpec) -> list[_Images]:
    """Returns the dataset of a lesson, by folder."""
    new = _Images(f"{lesson.repeats}_tiles", _NEW, tiles, _SEED, "Delft tiles, blue on white checks: what is new")
    old = _Images("1_known", lesson.known, scenes, _SEED + 2, "of what the base knows, so that it keeps that")
    return [new, old] if lesson.known else [new]


_ABOUT: Final = """\
This folder was made by `flame-train quickstart --family {family}`.

  images/             the dataset, drawings with captions; folders' names say how often each comes in an epoch
{images}
  base.safetensors    the base model: {base}
  config.toml         what was trained and how; not one to copy. For a run of your own: flame-train init {family}
  run/                the run: lora.safetensors, log.jsonl, checkpoints/{page}
  held-out/           images that were never trained on: more tiles, and what the base knew already
"""


def run(directory: Path, device: str | None, name: str = "sdxl") -> dict[str, Any]:
    """Runs `quickstart` in `directory`; it makes missing files and does unfinished work.

    `device` None takes the GPU if one is usable, else the CPU, and says which. Returns all paths, and the loss on
    held-out images before and after, of the new style and of known shapes. Raises OutputError if the folder holds
    anything but a quickstart of this family, or was copied. Raises EnvironmentFault if the wanted device cannot be
    used.
    """
    chosen = usable_device(device)
    family = FAMILIES[name]
    source = lay(directory.resolve(), chosen, family)
    config = load(str(source))
    _refuse_copy(source, config)
    session = Session(chosen)
    with session.stop:
        plan = make_plan(check(config, family), session.stop)
        result = train_plan(plan, session)
        _LOG.info("measuring the loss on images that were not trained on")
        measured = held_out_losses(plan, source.with_name(HELD_OUT), Path(result["lora"]), session)
    losses = {name: {when: round(loss, 4) for when, loss in both.items()} for name, both in measured.items()}
    image = _draw_page(plan, source.parent, family.lesson)
    return {
        "lora": result["lora"],
        "log": result["log"],
        "image": str(image) if image else None,
        "config": str(source),
        "device": chosen,
        "steps": result["steps"],
        "held_out_loss": losses,
        "note": family.lesson.note,
        "next": _next(plan, Path(result["lora"]), chosen),
    }


def _draw_page(plan: Plan, folder: Path, lesson: QuickstartSpec) -> Path | None:
    """Draws the page of the first and the last grid; None where there are not two of them."""
    prompts = [prompt.text for prompt in plan.config.sample.prompts]
    grids = sorted((Path(plan.config.output.dir) / "samples").glob("step-*.png"))
    if len(grids) < 2:
        return None
    new = _images(lesson)[0]
    rows = [
        Row(
            f"Taught: {new.number} images such as these, each with its caption",
            dataset_images(folder / "images" / new.folder),
        ),
        Row("Before training", grid_images(grids[0], prompts)),
        Row(f"After {plan.config.train.steps} steps, from the same prompts and noise", grid_images(grids[-1], prompts)),
    ]
    title = "What a LoRA learnt in a minute; on the right of the line, what the base model knew before"
    return write_page(folder / "before-after.png", title, rows, line_before=len(lesson.prompts))


def _next(plan: Plan, lora: Path, device: str) -> list[str]:
    """Lists what somebody does after a quickstart."""
    prompts, data, precision = plan.config.sample.prompts, plan.config.data, plan.config.train.precision
    words = ["-m", plan.config.model.checkpoint, "--lora", str(lora), "-o", str(lora.with_name("mine.png"))]
    if prompts:
        words += ["-p", "a delft tile with a ring", "--width", str(data.resolution), "--height", str(data.resolution)]
        words += ["--precision", precision, "--device", device]
    drawing = [f"another image: {shlex.join(['flame-train', 'sample', *words])}"] if prompts else []
    return [*drawing, f"your own LoRA: flame-train init {plan.model.name} --preset style -o my.toml"]


def usable_device(device: str | None) -> str:
    """Chooses the device to use; the only place where one is chosen for the user."""
    if device is not None:
        get_backend(device)
        return device
    try:
        get_backend("cuda")
    except EnvironmentFault as fault:
        _LOG.info("device: cpu, because no GPU is usable: %s", str(fault).splitlines()[0])
        return "cpu"
    _LOG.info("device: cuda")
    return "cuda"


def lay(folder: Path, device: str, family: Family) -> Path:
    """Makes whatever the folder lacks and returns the config's path. The config comes last: with it, all is there."""
    about, source = folder / "ABOUT.txt", folder / "config.toml"
    lesson = family.lesson
    if str(folder).encode(errors="replace").decode() != str(folder):
        raise ConfigError(
            f"{shown(folder)}: expected a name in UTF-8, for config.toml holds no other; name another folder"
        )
    listed = "\n".join(f"    {p.folder + '/':<18}{p.number} {p.what}" for p in _images(lesson))
    page = _PAGE if lesson.prompts else ""
    text = _ABOUT.format(family=family.name, base=lesson.base, images=listed, page=page)
    with disk_errors(folder):
        if folder.is_dir() and any(folder.iterdir()) and not _is(about, text):
            raise OutputError(
                f"{folder}: expected an empty or new folder, or one that quickstart made for this family, but other "
                "files are in it; name another folder: flame-train quickstart DIR"
            )
    make_folder(folder, "name another: flame-train quickstart DIR")
    if source.exists():
        return source
    _write_text(about, text)
    count = sum(write_images(folder / "images" / p.folder, p.number, p.seed, p.make) for p in _images(lesson))
    write_images(folder / HELD_OUT / "new", _HELD_OUT["new"], _SEED + 1, tiles)
    family.write_small_base(folder, _SEED)
    _LOG.info("made %d images and a small base model in %s", count, folder)
    _write_text(source, config_text(folder, device, family.name, lesson, family.unsupported_keys()))
    return source


def _refuse_copy(source: Path, config: Config) -> None:
    """Refuses a copied or moved folder, whose config names the original one."""
    folder = source.parent
    if not Path(config.output.dir).resolve().is_relative_to(folder):
        raise OutputError(
            f"{source}: its output.dir is {config.output.dir}, which lies outside {folder}; was the folder copied or "
            "moved? Set the paths in it right, or name a new folder: flame-train quickstart DIR"
        )


def _is(about: Path, text: str) -> bool:
    return about.is_file() and about.read_text(encoding="utf-8", errors="replace") == text


def held_out_losses(plan: Plan, folder: Path, lora: Path, session: Session) -> dict[str, dict[str, float]]:
    """Measures the loss on images that were not trained on, without and with the LoRA of the file.

    `folder` is the folder for these images. Returns for "new" and "known" images the loss "before" and "after".
    """
    device, config, model = session.device, plan.config, plan.model
    sets = {
        name: _examples(plan, folder / name, make, _HELD_OUT[name], session)
        for name, make in (("new", tiles), ("known", scenes))
    }
    denoiser = model.load_denoiser(device=device, dtype=config.train.precision)
    objective = model.objective(config.model, LossSection(), device)  # a loss without weights compares with others
    validators = {
        name: Validator(
            denoiser,
            objective,
            HeldOut.of(examples, model.paddings),
            timesteps=_LEVELS,
            batch_size=_LEVELS,
            device=device,
            dtype=as_dtype(config.train.precision),
        )
        for name, examples in sets.items()
    }

    def measured() -> dict[str, float]:
        return {name: validator.measure().loss for name, validator in validators.items()}

    before = measured()
    attach_factors(denoiser.network, from_file(lora, model.lora_names).state[denoiser.component])
    session.stop.check("after training, which is done")
    after = measured()
    return {name: {"before": before[name], "after": after[name]} for name in sets}


def _examples(plan: Plan, folder: Path, make: Maker, count: int, session: Session) -> list[Example]:
    """Makes images with another seed than that of training, and encodes them."""
    write_images(folder, count, _SEED + 1, make)
    cache = str(cache_folder(plan.config.data))
    data = plan.config.data.model_copy(update={"path": str(folder), "sets": (), "cache": cache})
    other = make_plan(replace(plan.checked, config=plan.config.model_copy(update={"data": data})), session.stop)
    keys = other.encoding.keys(other.samples, ())
    encoded = encode(other, keys, session)
    return [encoded.example(i) for i in range(len(other.samples.rows))]


def _write_text(path: Path, text: str) -> None:
    raw = text.encode()
    write_atomically(path, [raw], len(raw))
