"""Runs on the CPU: four steps with a stop after two, then the commands for the LoRA that came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from world import FAMILIES, KINDS, World, digest, heard, program

import flame_train
from flame_train.errors import FlameError

WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cached text": {},
    "text in the step": {"text_encoders.cache": "off"},
    "trained CLIP": {"text_encoders.train": ["clip_l"]},
    "trained T5": {"text_encoders.train": ["t5"]},
    "trained Qwen3": {"text_encoders.train": ["qwen3"]},
    "offload": {"gradient.checkpointing": "full", "model.offload": 1.0},
    "fp8": {"model.quantize": "fp8"},
    "nf4": {"model.quantize": "nf4"},
}
_FOR_LORA: Final[Mapping[str, Mapping[str, Any]]] = {
    "class kept": {"preservation.kind": "class", "preservation.class_word": "shape", "captions.trigger": "circle"},
    "slider": {"preservation.kind": "slider", "preservation.positive": "red", "preservation.negative": "blue"},
    "second model": {"sample.model": "{base}"},
    "control": {"data.control": "{images}"},
    "everything else": {
        **{"gradient.accumulation": 2, "train.ema_decay": 0.9, "data.caption_dropout": 0.3, "log.gradients_every": 1},
        **{"optimizer.name": "prodigy", "schedule.name": "polynomial", "loss.timestep_sampling": "logit_normal"},
        **{"lora.dropout": 0.1, "captions.shuffle": True, "data.flip": True, "output.format": "both"},
    },
}
FOR_KIND: Final = {
    "lora": _FOR_LORA,
    "dora": {"norms of rows": {"lora.wd_on_output": True, "output.format": "both"}},
}
TASKS: Final = [f"{family}/{kind}" for family in FAMILIES for kind in KINDS]
SEED: Final = "train.seed=7"
_MEASURED: Final = {"images_per_s", "data_wait_ms", "memory", "steps_per_s", "pid", "host", "seconds"}
_DRAWN: Final = re.compile(r"<svg.*?</svg>|[\d.:]+", re.DOTALL)
_BOTH: Final = {"lora", "locon"}
"""Kinds that diffusers reads."""


def settings(world: World, family: str, kind: str) -> dict[str, Any]:
    """Of a run that takes a second, by path."""
    return {
        "model.checkpoint": str(world.base(family)),
        "data.path": str(world.images),
        "data.resolution": 64,
        "data.bucket_step": 32,
        "data.cache": str(world.own / "cache"),
        "lora.kind": kind,
        "lora.rank": 2,
        "lora.alpha": 2.0,
        "lora.targets": ["full"],
        "optimizer.lr": 1e-2,
        "schedule.warmup_steps": 1,
        "train.steps": 4,
        "train.precision": "fp32",
        "checkpoint.every": 2,
        "sample.every": 4,
        "sample.prompts": ["a red circle"],
        "sample.steps": 2,
        "validation.every": 4,
        "validation.fraction": 0.3,
        "validation.timesteps": 1,
        "output.dir": str(world.own / "run"),
        "output.format": "both" if kind in _BOTH else "kohya",
    }


def toml(values: Mapping[str, Any]) -> str:
    """A config's text; JSON's numbers, texts and lists are TOML's too."""
    return "".join(f"{path} = {json.dumps(value)}\n" for path, value in values.items())


def cases(world: World, task: str) -> dict[str, Callable[[], Any]]:
    family, kind = task.split("/")
    ways = {**WAYS, **FOR_KIND.get(kind, {})}
    return {f"{task}/{way}": partial(run, world, family, kind, way, own) for way, own in ways.items()}


def run(world: World, family: str, kind: str, way: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Both halves of a run: from Python, and with the command from a file."""
    places = {"base": world.base(family), "images": world.images}
    own = {path: value.format(**places) if isinstance(value, str) else value for path, value in own.items()}
    given = settings(world, family, kind) | own
    file, folder = world.own / "config.toml", world.own / "run"
    file.write_text(toml(given))
    for old in (folder, world.own / "cache"):
        shutil.rmtree(old, ignore_errors=True)
    sections: dict[str, dict[str, Any]] = {}
    for path, value in given.items():
        section, key = path.split(".")
        sections.setdefault(section, {})[key] = value
    first = heard(world, lambda: from_python(sections))
    second = program(world, "train", str(file), "--device", "cpu", "--json", "--set", SEED)
    found = {"code": second["code"], "first": first, "second": second, "files": files(folder)}
    if found["code"] == 0 and way == "cached text":
        found["cache"] = {str(path.relative_to(world.own)): digest(path.read_bytes()) for path in cached(world)}
        found["commands"] = commands(world, family, folder / "lora.safetensors")
    return found


def from_python(sections: Mapping[str, Mapping[str, Any]]) -> int:
    """Trains until a checkpoint is saved, and then as after Ctrl-C. Returns the exit code."""

    def stop(step: int, folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    try:
        flame_train.train(sections, overrides=[SEED], device="cpu", on_checkpoint=stop)
    except Exception as error:  # whatever it is: a bug stays, too, until it is looked for
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        return error.exit_code if isinstance(error, FlameError) else 1
    return 0


def files(folder: Path) -> dict[str, Any]:
    """The hash of each file of a run; of the log and the status what no clock tells, of grids the pixels."""
    from PIL import Image

    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name in ("log.jsonl", "status.json"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[name] = [json.loads(line, object_pairs_hook=_unmeasured) for line in lines]
        elif path.suffix in (".png", ".jpg"):
            with Image.open(path) as image:
                found[name] = [list(image.size), digest(image.tobytes())]
        elif path.suffix == ".html":  # whose curves have times too
            found[name] = digest(_DRAWN.sub("", path.read_text()).encode())
        else:
            found[name] = digest(path.read_bytes())
    return found


def _unmeasured(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name not in _MEASURED}


def cached(world: World) -> list[Path]:
    return sorted(path for path in (world.own / "cache").rglob("*.safetensors") if path.is_file())


def commands(world: World, family: str, lora: Path) -> dict[str, Any]:
    """What the commands for LoRA files answer, and the files that they write."""
    base, made = str(world.base(family)), world.own / "made"
    made.mkdir(exist_ok=True)
    small = ("--width", "64", "--height", "64", "--steps", "1", "--precision", "fp32", "--device", "cpu")
    lines = {
        "inspect": ["inspect", str(lora)],
        "inspect base": ["inspect", base],
        "verify": ["verify", str(lora)],
        "to diffusers": ["convert", str(lora), str(made / "diffusers.safetensors"), "--to", "diffusers"],
        "to kohya": ["convert", str(made / "diffusers.safetensors"), str(made / "kohya.safetensors"), "--to", "kohya"],
        "merge": ["merge", base, str(lora), str(made / "merged.safetensors")],
        "merge loras": [
            "merge",
            "--to",
            "lora",
            "--lora",
            str(lora),
            "--rank",
            "2",
            "-o",
            str(made / "two.safetensors"),
        ],
        "extract": [
            "extract",
            base,
            str(made / "merged.safetensors"),
            "--rank",
            "2",
            "-o",
            str(made / "out.safetensors"),
        ],
        "resize": ["resize", str(lora), "--rank", "1", "-o", str(made / "one.safetensors")],
        "sample": ["sample", "-m", base, "--lora", str(lora), "-p", "a circle", "-o", str(made / "a.png"), *small],
        "reproduce": [
            "reproduce",
            str(lora),
            "--config",
            str(world.own / "config.toml"),
            "--device",
            "cpu",
            "--dry-run",
            "--set",
            SEED,
        ],
        "dataset": ["dataset", str(world.own / "config.toml"), "-o", str(made / "report")],
    }
    found: dict[str, Any] = {name: program(world, *line) for name, line in lines.items()}
    found["files"] = files(made)
    shutil.rmtree(made)
    return found
