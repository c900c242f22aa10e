"""`flame-train quickstart`: the whole way from a dataset and a base model to a LoRA, from nothing, in about a minute.

Everything that is needed is made by code: the pictures are drawn, the base model is small and random (see
`small_base`), and the config is the commented one that `init` writes. Training is the pipeline of every other run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final, Literal

from flame_train.adapters.formats import from_file
from flame_train.adapters.lora import attach_factors
from flame_train.config.load import load
from flame_train.config.render import commented
from flame_train.config.schema import (
    CheckpointSection,
    Config,
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    SampleSection,
    ScheduleSection,
    TrainSection,
)
from flame_train.diffusion.objectives import Objective
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.errors import EnvironmentFault, OutputError
from flame_train.io.durable import write_durably
from flame_train.io.files import make_folder
from flame_train.training.encode import encode, keys_of
from flame_train.training.stop import StopRequest
from flame_train.training.validate import held_out_loss

from . import RECIPES
from .before_after import write_before_after
from .drawings import write_drawings
from .pictures import noise_schedule
from .pipeline import Plan, make_plan, train_plan
from .small_base import write_small_base

_LOG = logging.getLogger(__name__)

_STEPS: Final = 60
_PROMPTS: Final = (
    "a blue circle on an orange background",
    "a dark blue square on a yellow background",
    "a sky blue triangle on a red background",
    "a blue circle on a cream background",
)
_ABOUT: Final = """\
This folder was made by `flame-train quickstart`.

  pictures/           twelve drawings with captions: the dataset
  base.safetensors    the base model: SDXL's layout, small, with random weights, so its own pictures are abstract
  config.toml         what was trained and how; change it, or copy it for a run of your own
  run/                the run: lora.safetensors, log.jsonl, checkpoints/, samples/
  before-after.png    the same prompts from the same noise, before and after training
"""


def run(directory: Path, device: str | None) -> dict[str, Any]:
    """The whole of `quickstart` in `directory`: what is not there is made, what is not done is done.

    `device` None takes the GPU if one is usable, else the CPU, and says which. Returns where everything is, and the
    loss on held-out noise before and after. Raises OutputError if the folder holds anything but a quickstart,
    EnvironmentFault if the device that was asked for cannot be used.
    """
    chosen = _device(device)
    source = _lay(directory.resolve(), chosen)
    config = load(str(source))
    with StopRequest() as stop:
        plan = make_plan(RECIPES["sdxl"], config, stop)
        result = train_plan(plan, chosen, stop)
        before, after = _held_out(plan, Path(result["lora"]), chosen, stop)
    picture = write_before_after(Path(result["samples"]), source.with_name("before-after.png"), result["steps"])
    return {
        "lora": result["lora"],
        "log": result["log"],
        "picture": str(picture) if picture else None,
        "config": str(source),
        "device": chosen,
        "steps": result["steps"],
        "held_out_loss": {"before": round(before, 4), "after": round(after, 4)},
        "note": "the base model is small and random: this shows that training works, not what SDXL can draw",
        "next": f"flame-train sdxl-lora --config {source} --device {chosen}",
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


def _lay(folder: Path, device: str) -> Path:
    """Makes whatever the folder lacks and returns the config's path. The config comes last: with it, all is there."""
    about, source = folder / "ABOUT.txt", folder / "config.toml"
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(about):
        raise OutputError(
            f"{folder}: expected an empty or new folder, or one that quickstart made, but other files are in it; "
            "name another folder: flame-train quickstart DIR"
        )
    make_folder(folder)
    if source.exists():
        return source
    _write_text(about, _ABOUT)
    pictures = write_drawings(folder / "pictures")
    weights = write_small_base(folder / "base.safetensors")
    _LOG.info("made %d pictures and a random base model of %.1f million weights in %s", pictures, weights / 1e6, folder)
    _write_text(source, commented(_config(folder, device), "A small LoRA from nothing, as quickstart trained it"))
    return source


def _is_ours(about: Path) -> bool:
    return about.is_file() and about.read_text(encoding="utf-8", errors="replace") == _ABOUT


def _config(folder: Path, device: str) -> Config:
    """Sized for two CPU cores and a minute; a learning rate far above the usual one, for so few steps."""
    return Config(
        model=ModelSection(checkpoint=str(folder / "base.safetensors")),
        data=DataSection(path=str(folder / "pictures"), resolution=128, bucket_step=32, batch_size=4),
        lora=LoraSection(rank=8, alpha=8.0, targets=("full",)),
        optimizer=OptimizerSection(lr=7e-3),
        schedule=ScheduleSection(name="cosine", warmup_steps=5),
        train=TrainSection(steps=_STEPS, precision=_precision(device)),
        checkpoint=CheckpointSection(every=_STEPS // 2, keep=2),
        sample=SampleSection(every=_STEPS, prompts=_PROMPTS, steps=12, guidance=1.0),
        output=OutputSection(dir=str(folder / "run")),
    )


def _precision(device: str) -> Literal["fp32", "bf16"]:
    return "bf16" if device == "cuda" else "fp32"


def _held_out(plan: Plan, lora: Path, device: str, stop: StopRequest) -> tuple[float, float]:
    """The loss on held-out noise over the training pictures, without and with the LoRA as its file has it."""
    config, family = plan.config, plan.family
    encoded = encode(plan.placed, keys_of(plan.placed, config, family, ()), config, family, device, stop)
    examples = [encoded.example(i, False) for i in range(len(plan.placed.placements))]
    denoiser = family.denoiser(config, device)
    objective = Objective(noise_schedule(config), config.model.prediction, device=device)

    def measured() -> float:
        return held_out_loss(
            denoiser, objective, examples, device=device, dtype=as_dtype(config.train.precision),
            seed=config.train.seed,
        )  # fmt: skip

    before = measured()
    attach_factors(denoiser.model, from_file(lora, family.lora_names()).state[denoiser.component])
    stop.check("after training, which is done")
    return before, measured()


def _write_text(path: Path, text: str) -> None:
    raw = text.encode()
    write_durably(path, [raw], len(raw))
