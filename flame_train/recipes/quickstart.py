"""`flame-train quickstart`: the whole way from a dataset and a base model to a LoRA, from nothing, in about a minute.

SDXL's base model is the small one of the package (see `small_base`), which draws coloured shapes as a caption says. Ten
drawn pictures teach it a style that it did not know, under a name that it did not know, and pictures of what it knows
beside them keep it from forgetting that. The other families' bases have their true structure and random weights: they
show that everything works, and draw noise. The config is the commented one that `init` writes. Training is the pipeline
of every other run.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from flame_train.adapters.formats import from_file
from flame_train.adapters.lora import attach_factors
from flame_train.config.load import load
from flame_train.config.render import commented
from flame_train.config.schema import (
    CheckpointSection,
    Config,
    DataSection,
    LoraSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    SampleSection,
    ScheduleSection,
    TrainSection,
)
from flame_train.data.files import shown
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.errors import ConfigError, EnvironmentFault, OutputError
from flame_train.io.durable import write_durably
from flame_train.io.files import disk_errors, make_folder
from flame_train.training.encode import encode, keys_of
from flame_train.training.family import Denoiser, Example
from flame_train.training.step import Objective
from flame_train.training.stop import StopRequest
from flame_train.training.validate import held_out_loss

from . import RECIPES
from .before_after import write_before_after
from .drawings import Maker, scenes, tiles, write_pictures
from .pipeline import train_plan
from .plan import Plan, make_plan
from .small_base import copy_small_base
from .small_flow import small_flux, small_sd3, write_small

_LOG = logging.getLogger(__name__)

_NEW: Final = 10  # pictures of the style that is taught
_DRAWN_IN: Final = 20  # steps from noise to a picture
_HELD_OUT: Final = {"new": 24, "known": 48}  # pictures of each kind
_SEED: Final = 2307
_PROMPTS: Final = (
    "a delft tile with a large circle",
    "a delft tile with a square on the left",
    "a delft tile with a triangle",
    "a yellow square on the left on a green background",
)


class _Pictures(NamedTuple):
    """Some of what is trained on: where it goes, how much, how it is drawn, and what it is."""

    folder: str
    number: int
    make: Maker
    seed: int
    what: str


@dataclass(frozen=True, slots=True)
class _Lesson:
    """How a base is taught: how often the new pictures come in an epoch beside so many known ones, and by what."""

    repeats: int = 1
    known: int = 0
    resolution: int = 64
    bucket_step: int = 16
    batch_size: int = 5
    steps: int = 80
    lr: float = 1e-3  # far above the usual one, for so few steps
    targets: tuple[str, ...] = ("attention",)
    loss: LossSection = field(default_factory=LossSection)

    @property
    def pictures(self) -> list[_Pictures]:
        """The dataset, by folder."""
        new = _Pictures(f"{self.repeats}_tiles", _NEW, tiles, _SEED, "Delft tiles, blue on white checks: what is new")
        old = _Pictures("1_known", self.known, scenes, _SEED + 2, "of what the base knows, so that it keeps that")
        return [new, old] if self.known else [new]


@dataclass(frozen=True, slots=True)
class _Start:
    """A family's base model: what writes `base.safetensors` into a folder, what it is, and how it is taught."""

    write: Callable[[Path], object]
    base: str
    note: str
    lesson: _Lesson


_RANDOM: Final = "the base model is small and random: this shows that training works, and draws noise"
_STARTS: Final = {
    # What the captions' words stand for is all that is trained, so that captions of known things hardly meet it. The
    # loss is weighed (min-SNR with a tiny gamma) towards the noisiest timesteps, where colours are decided. The numbers
    # were found in scripts/small_sdxl/LOG.md.
    "sdxl": _Start(
        lambda folder: copy_small_base(folder / "base.safetensors"),
        "a small SDXL that draws coloured shapes, and has never seen a Delft tile",
        "the base model is small: this shows that training works, not what SDXL can draw",
        _Lesson(3, 160, 96, 32, 8, 200, 2e-3, ("*.attn2.to_k", "*.attn2.to_v"), LossSection(snr_gamma=0.005)),
    ),
    "sd3": _Start(
        lambda folder: write_small(small_sd3(), folder, _SEED),
        "a small SD3.5 with random weights, which draws noise",
        _RANDOM,
        _Lesson(),
    ),
    "flux": _Start(
        lambda folder: write_small(small_flux(), folder, _SEED),
        "a small Flux.1 dev with random weights, which draws noise",
        _RANDOM,
        _Lesson(),
    ),
}
_ABOUT: Final = """\
This folder was made by `flame-train quickstart --family {family}`.

  pictures/           the dataset, drawings with captions; folders' names say how often each comes in an epoch
{pictures}
  base.safetensors    the base model: {base}
  config.toml         what was trained and how; change it, or copy it for a run of your own
  run/                the run: lora.safetensors, log.jsonl, checkpoints/, samples/
  before-after.png    the same prompts from the same noise, before and after training
  held-out/           pictures that were never trained on: more tiles, and what the base knew already
"""


def run(directory: Path, device: str | None, family: str = "sdxl") -> dict[str, Any]:
    """The whole of `quickstart` in `directory`: what is not there is made, what is not done is done.

    `device` None takes the GPU if one is usable, else the CPU, and says which. Returns where everything is, and the
    loss on held-out pictures before and after: of the new style, and of what the base knew already. Raises
    OutputError if the folder holds anything but a quickstart of this family, or was copied, EnvironmentFault if the
    device that was asked for cannot be used.
    """
    chosen = _device(device)
    source = _lay(directory.resolve(), chosen, family)
    config = load(str(source))
    _refuse_copy(source, config)
    with StopRequest() as stop:
        plan = make_plan(RECIPES[family], config, stop)
        result = train_plan(plan, chosen, stop)
        losses = _held_out(plan, source.with_name("held-out"), Path(result["lora"]), chosen, stop)
    picture = write_before_after(
        Path(result["lora"]).with_name("samples"), source.with_name("before-after.png"), result["steps"]
    )
    return {
        "lora": result["lora"],
        "log": result["log"],
        "picture": str(picture) if picture else None,
        "config": str(source),
        "device": chosen,
        "steps": result["steps"],
        "held_out_loss": losses,
        "note": _STARTS[family].note,
        "next": f"flame-train {family}-lora --config {shlex.quote(str(source))} --device {chosen}",
    }


def _device(asked: str | None) -> str:
    """The device to use; the only place where one is chosen for the user."""
    if asked is not None:
        get_backend(asked)
        return asked
    try:
        get_backend("cuda")
    except EnvironmentFault as fault:
        _LOG.info("device: cpu, for no GPU is usable: %s", str(fault).splitlines()[0])
        return "cpu"
    _LOG.info("device: cuda")
    return "cuda"


def _lay(folder: Path, device: str, family: str) -> Path:
    """Makes whatever the folder lacks and returns the config's path. The config comes last: with it, all is there."""
    about, source = folder / "ABOUT.txt", folder / "config.toml"
    start = _STARTS[family]
    if str(folder).encode(errors="replace").decode() != str(folder):
        raise ConfigError(
            f"{shown(folder)}: expected a name in UTF-8, for config.toml holds no other; name another folder"
        )
    listed = "\n".join(f"    {p.folder + '/':<18}{p.number} {p.what}" for p in start.lesson.pictures)
    text = _ABOUT.format(family=family, base=start.base, pictures=listed)
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
    made = sum(write_pictures(folder / "pictures" / p.folder, p.number, p.seed, p.make) for p in start.lesson.pictures)
    start.write(folder)
    _LOG.info("made %d pictures and put a small base model beside them in %s", made, folder)
    title = "A small LoRA from nothing, as quickstart trained it"
    _write_text(source, commented(_config(folder, device, start.lesson), title, RECIPES[family].foreign))
    return source


def _refuse_copy(source: Path, config: Config) -> None:
    """A folder that was copied or moved has a config that names the one it was made in: nothing must happen there."""
    folder = source.parent
    if not Path(config.output.dir).resolve().is_relative_to(folder):
        raise OutputError(
            f"{source}: its output.dir is {config.output.dir}, which lies outside {folder}; was the folder copied or "
            "moved? Set the paths in it right, or name a new folder: flame-train quickstart DIR"
        )


def _is(about: Path, text: str) -> bool:
    return about.is_file() and about.read_text(encoding="utf-8", errors="replace") == text


def _config(folder: Path, device: str, lesson: _Lesson) -> Config:
    """Sized for two CPU cores and a minute."""
    return Config(
        model=ModelSection(checkpoint=str(folder / "base.safetensors")),
        data=DataSection(
            path=str(folder / "pictures"),
            resolution=lesson.resolution,
            bucket_step=lesson.bucket_step,
            batch_size=lesson.batch_size,
            folder_repeats=True,
        ),
        lora=LoraSection(rank=16, alpha=16.0, targets=lesson.targets),
        optimizer=OptimizerSection(lr=lesson.lr),
        loss=lesson.loss,
        schedule=ScheduleSection(name="cosine", warmup_steps=5),
        train=TrainSection(steps=lesson.steps, precision=_precision(device)),
        checkpoint=CheckpointSection(every=lesson.steps // 2, keep=2),
        sample=SampleSection(every=lesson.steps, prompts=_PROMPTS, steps=_DRAWN_IN, guidance=3.0),
        output=OutputSection(dir=str(folder / "run")),
    )


def _precision(device: str) -> Literal["fp32", "bf16"]:
    return "bf16" if device == "cuda" else "fp32"


def _held_out(plan: Plan, folder: Path, lora: Path, device: str, stop: StopRequest) -> dict[str, dict[str, float]]:
    """The loss on pictures never trained on, without and with the LoRA as its file has it: new ones and known ones."""
    config, family = plan.config, plan.family
    sets = {
        name: _examples(plan, folder / name, make, _HELD_OUT[name], device, stop)
        for name, make in (("new", tiles), ("known", scenes))
    }
    denoiser = family.denoiser(config, device)
    plain = config.model_copy(update={"loss": LossSection()})  # a loss that weighs nothing compares with others
    objective = family.objective(plain, device)

    def measured() -> dict[str, float]:
        return {name: _loss(denoiser, objective, examples, config, device) for name, examples in sets.items()}

    before = measured()
    attach_factors(denoiser.model, from_file(lora, family.lora_names(config)).state[denoiser.component])
    stop.check("after training, which is done")
    after = measured()
    return {name: {"before": round(before[name], 4), "after": round(after[name], 4)} for name in sets}


def _examples(plan: Plan, folder: Path, make: Maker, count: int, device: str, stop: StopRequest) -> list[Example]:
    """Pictures of another seed than the trained ones', drawn, encoded and ready for the denoiser."""
    write_pictures(folder, count, _SEED + 1, make)
    config = plan.config.model_copy(
        update={"data": plan.config.data.model_copy(update={"path": str(folder), "cache": ""})}
    )
    placed = make_plan(plan.family, config, stop).placed
    encoded = encode(placed, keys_of(placed, config, plan.family, ()), config, plan.family, device, stop)
    return [encoded.example(i, False) for i in range(len(placed.placements))]


def _loss(denoiser: Denoiser, objective: Objective, examples: list[Example], config: Config, device: str) -> float:
    dtype, seed = as_dtype(config.train.precision), config.train.seed
    return held_out_loss(denoiser, objective, examples, device=device, dtype=dtype, seed=seed)


def _write_text(path: Path, text: str) -> None:
    raw = text.encode()
    write_durably(path, [raw], len(raw))
