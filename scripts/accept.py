"""What a person with a published checkpoint runs, so that others know whether flame-train reads and trains it.

    python scripts/accept.py CHECKPOINT [--out accept] [--steps 100] [--beside FOLDER] [--set KEY=VALUE ...]

CHECKPOINT is a single file or a diffusers folder. Six parts, each run whatever another says: names and shapes against
the tables; an image; the same image by diffusers, where it is installed and a diffusers folder is at hand (CHECKPOINT,
or `--beside`); a training run on four drawn images; the LoRA read back, renamed and drawn with; the same by diffusers.
`--set` takes keys of a config, such as `model.vae=FILE` and `text_encoders.t5=FILE` for ComfyUI's separate files, or
`gradient.checkpointing=full` for a small card. `--controls` draws and trains with so many control images beside each
image, of a model that takes them. `report.json` and `report.txt` in `--out` are what to send; they hold
no path of this machine. Ends with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accept_diffusers import INDICES, missing, only_edits
from full_run import config, draw, usual_side
from PIL import Image

from flame_train.adapters.formats import from_file
from flame_train.errors import FlameError
from flame_train.io.weights import open_weights
from flame_train.models.registry import family_of
from flame_train.networks.files.identify import identify

PROMPT = "a disc"
IMAGES = 4
SHOWN = 20
"""How many names of a list are put down."""


class NotTried(Exception):
    """A part that cannot be tried here, with the reason."""


class Failed(Exception):
    """A part that was tried and failed, with what was seen."""


@dataclass
class Acceptance:
    """One checkpoint's parts, and what they found so far."""

    args: argparse.Namespace
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.args.out

    @property
    def controls(self) -> list[Path]:
        """The control images of the images that are drawn: the first of each folder."""
        return [folder / "00.png" for folder in self.control_folders]

    @property
    def control_folders(self) -> list[Path]:
        """The folders of control images."""
        return [self.out / f"control-{n}" for n in range(1, self.args.controls + 1)]

    def part(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Runs a part and keeps its result: passed, failed or not tried, with the seconds."""
        begin, told = time.monotonic(), dict[str, Any]()
        try:
            result, told = "passed", run()
        except NotTried as reason:
            result, told = "not tried", {"reason": str(reason)}
        except (Failed, FlameError) as reason:
            result, told = "failed", {"reason": str(reason)}
        self.found[name] = {"result": result, "seconds": round(time.monotonic() - begin, 1), **told}
        print(f"{result:9}  {name}" + (f": {told['reason']}" if "reason" in told else ""), flush=True)

    def passed(self, name: str) -> dict[str, Any]:
        """What an earlier part found. Raises NotTried if it did not pass."""
        if self.found[name]["result"] != "passed":
            raise NotTried(f"it needs what this part makes: {name}")
        return self.found[name]


def command(argv: list[str]) -> str:
    """Runs a command; its output. Raises Failed with the end of what it said."""
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise Failed("\n".join((done.stderr or done.stdout).strip().splitlines()[-SHOWN:]))
    return done.stdout


def flame(*argv: str) -> str:
    """Runs a command of the program. Raises Failed."""
    return command([sys.executable, "-m", "flame_train", *argv])


def told(*argv: str) -> dict[str, Any]:
    """What a command prints with --json."""
    made: dict[str, Any] = json.loads(flame(*argv, "--json"))
    return made


# ---- the parts ------------------------------------------------------------------------------------------------------


def names_and_shapes(a: Acceptance) -> dict[str, Any]:
    """Every tensor against the tables. Opening raises for a tensor that is missing, unexpected or mis-shaped."""
    with open_weights(a.args.checkpoint) as weights:
        shapes, is_what = weights.shapes, identify(weights.shapes, weights.metadata)
    family = family_of(a.args.checkpoint)
    a.args.size = a.args.size or usual_side(a.args.checkpoint)
    resolved = family.files.resolve(shapes)
    parts = family.files.all_parts(a.args.checkpoint, family.denoiser, skip=())
    sizes = {
        name: {component: network.shapes() for component, network in made().items()}
        for name, made in family.published.items()
    }
    return {
        "family": family.name,
        "detail": is_what.detail,
        "tensors": len(shapes),
        "components": {
            name: {
                "tensors": len(part.sources),
                "parameters": part.network.num_weights(),
                "shapes of": sorted(n for n, of in sizes.items() if of.get(name) == part.network.shapes()),
            }
            for name, part in parts.items()
        },
        "names of no component": len(resolved.unknown),
        "some of them": sorted(resolved.unknown)[:SHOWN],
    }


def image(a: Acceptance, name: str, seed: int, *more: str) -> dict[str, Any]:
    """Draws `name`.png; the command's report."""
    options = ["--steps", str(a.args.sample_steps), "--width", str(a.args.size), "--height", str(a.args.size)]
    options += [
        "--seed",
        str(seed),
        "--precision",
        a.args.precision,
        "--device",
        a.args.device,
        *as_options(a.args.set),
    ]
    options += [word for file in a.controls for word in ("--control", str(file))]
    file = a.out / f"{name}.png"
    return told("sample", "-m", str(a.args.checkpoint), "-p", PROMPT, "-o", str(file), "--force", *options, *more)


def as_options(overrides: list[str]) -> list[str]:
    """The options of `sample` for the keys of a config that name files of networks."""
    pairs = [override.partition("=")[::2] for override in overrides]
    keys = [(key.rpartition("."), value) for key, value in pairs]
    return [
        word
        for (section, _, key), value in keys
        if section == "text_encoders" or (section == "model" and key in ("vae", "quantize", "prediction", "qwen_edit"))
        for word in (f"--{key.replace('_', '-')}", value)
    ]


def drawn(a: Acceptance) -> dict[str, Any]:
    """An image, and one of another seed, which says how far two images lie apart."""
    made = image(a, "image", a.args.seed)
    image(a, "other", a.args.seed + 1)
    spread = apart(a.out / "image.png", a.out / "other.png")
    return {"steps": made["steps"], "guidance": made["guidance_scale"], "to another seed, of 255": spread}


def apart(one: Path, two: Path) -> float:
    """The mean distance of two images' values, of 255."""
    pixels = []
    for path in (one, two):
        with Image.open(path) as opened:
            pixels.append(np.asarray(opened.convert("RGB")).astype(float))
    return round(float(np.abs(pixels[0] - pixels[1]).mean()), 3)


def beside(a: Acceptance, ours: str, theirs: str, lora: Path | None = None) -> dict[str, Any]:
    """Our image beside diffusers' from the same noise: at most a tenth as far apart as two seeds, and a rounding."""
    made = a.passed("an image")
    if lacking := missing(family_of(a.args.checkpoint).name, a.args.beside):
        raise NotTried(f"{', '.join(lacking)} not installed")
    folder = a.args.beside
    if not any((folder / index).is_file() for index in INDICES):
        raise NotTried("name a diffusers folder of the same model with --beside")
    if only_edits(folder) and not a.args.controls:
        raise NotTried("its pipeline draws with control images alone: say --controls 1")
    script = Path(__file__).with_name("accept_diffusers.py")
    options = ["--size", str(a.args.size), "--steps", str(made["steps"]), "--guidance", str(made["guidance"])]
    options += ["--seed", str(a.args.seed), "--precision", a.args.precision, "--device", a.args.device]
    options += ["--prompt", PROMPT, *(["--lora", str(lora)] if lora else [])]
    options += [word for file in a.controls for word in ("--control", str(file))]
    report = json.loads(command([sys.executable, str(script), str(folder), str(a.out / theirs), *options]))
    distance, most = apart(a.out / ours, a.out / theirs), round(1 + 0.1 * made["to another seed, of 255"], 3)
    if distance > most:
        raise Failed(f"the images lie {distance} of 255 apart, expected at most {most}; {report}")
    return {**report, "apart, of 255": distance, "at most": most}


def trained(a: Acceptance) -> dict[str, Any]:
    """A run on drawn images: its losses, the time of a step, and the memory it took beside what was predicted."""
    draw(a.out / "images", IMAGES)
    file = a.out / "run.toml"
    file.write_text(config(a.args.checkpoint, a.out / "images", a.out / "run", a.args.steps))
    settings = [f"data.resolution={a.args.size}", "sample.every=0", "output.format=both", *a.args.set]
    settings += [f"train.precision={a.args.precision}"]
    if a.args.controls:
        settings += [f"data.control={json.dumps([str(folder) for folder in a.control_folders])}"]
    argv = [str(file), "--device", a.args.device, *(word for s in settings for word in ("--set", s))]
    predicted = told("train", *argv, "--dry-run")["predicted_memory_gib"]
    flame("train", *argv)
    lines = [json.loads(line) for line in (a.out / "run" / "log.jsonl").read_text().splitlines()]
    if len(lines) != a.args.steps or not all(np.isfinite([row["loss"], row["grad_norm"]]).all() for row in lines):
        raise Failed(f"expected {a.args.steps} steps of finite losses and gradients, got {lines[-3:]}")
    tenth = max(1, len(lines) // 10)
    losses = [float(np.mean([row["loss"] for row in some])) for some in (lines[:tenth], lines[-tenth:])]
    return {
        "steps": len(lines),
        "mean loss of the first and the last tenth": losses,
        "predicted memory GiB": predicted,
        "peak GiB": round(max(row.get("memory", 0) for row in lines) / 2**30, 2),
        "last line of the log": lines[-1],
    }


def read_back(a: Acceptance) -> dict[str, Any]:
    """The LoRA in both formats: the same layers and values, what programs take of them, and an image with it."""
    a.passed("training")
    files = sorted((a.out / "run").glob("lora*.safetensors"))
    if len(files) != 2:
        raise Failed(f"expected a LoRA in two formats, got {[file.name for file in files]}")
    family = family_of(a.args.checkpoint)
    states = []
    for file in files:
        with open_weights(file) as weights:
            names = family.lora_names_in(weights.shapes)
        states.append(from_file(file, names).state)
    layers = [{(c, name) for c, network in state.items() for name in network} for state in states]
    if layers[0] != layers[1] or not layers[0]:
        raise Failed(f"the formats have {len(layers[0])} and {len(layers[1])} layers, of which others are in one alone")
    furthest = max(difference(states[0][c][name], states[1][c][name]) for c, name in layers[0])
    if furthest > 1e-2:  # of bf16, into which alpha / rank is multiplied
        raise Failed(f"the formats' updates differ by {furthest} of their size")
    image(a, "image-lora", a.args.seed, "--lora", str(files[0]))
    changed = apart(a.out / "image.png", a.out / "image-lora.png")
    return {
        "layers": len(layers[0]),
        "formats apart": furthest,
        "image changed, of 255": changed,
        "programs": {file.name: readers(file) for file in files},
    }


def difference(one: Any, two: Any) -> float:
    """The relative distance of two LoRAs' updates of a layer."""
    first, second = one.delta(), two.delta()
    size = float(np.linalg.norm(first))
    return float(np.linalg.norm(first - second)) / size if size else float(np.linalg.norm(second))


def readers(file: Path) -> Any:
    """What `verify` says of a file, by program."""
    try:
        return {p["program"]: f"{p['verdict']} ({p['version']})" for p in told("verify", str(file))["programs"]}
    except Failed as reason:
        return str(reason)


# ---- the report -----------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, str]:
    """What `doctor` found, by name."""
    done = subprocess.run(
        [sys.executable, "-m", "flame_train", "doctor", "--device", device.partition(":")[0], "--json"],
        capture_output=True,
        text=True,
    )
    lines = json.loads(done.stdout)["lines"] if done.stdout.startswith("{") else []
    return {line["name"]: line["found"] for line in lines if line["state"] == "ok"}


def text(report: dict[str, Any]) -> str:
    """The report for a person: a heading a part, and a line a fact."""
    lines = [f"{report['checkpoint']}: {report['result']}", ""]
    for name, part in report["parts"].items():
        facts = {k: v for k, v in part.items() if k not in ("result", "seconds")}
        lines += [f"{part['result']}: {name}, {part['seconds']} s", *(f"  {k}: {v}" for k, v in facts.items()), ""]
    return "\n".join([*lines, "machine", *(f"  {k}: {v}" for k, v in report["machine"].items()), ""])


def without_paths(value: Any, hidden: dict[str, str]) -> Any:
    """The same with the machine's folders called by what they are."""
    if isinstance(value, dict):
        return {k: without_paths(v, hidden) for k, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v, hidden) for v in value]
    if isinstance(value, str):
        for path, name in hidden.items():
            value = value.replace(path, name)
    return value


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=Path("accept"))
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--size", type=int, default=0, help="pixels a side; 0: the family's own")
    parser.add_argument("--sample-steps", type=int, default=8, help="of an image; 0: the model's own")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--controls", type=int, default=0, help="control images beside each image")
    parser.add_argument("--beside", type=Path, help="a diffusers folder of the same model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(argv)
    args.checkpoint, args.out = args.checkpoint.expanduser().resolve(), args.out.expanduser().resolve()
    args.beside = args.beside.expanduser().resolve() if args.beside else args.checkpoint
    if not args.checkpoint.exists():
        parser.error(f"{args.checkpoint}: expected a file or a folder, found nothing")
    if (args.out / "run").exists():
        parser.error(f"{args.out}: has a run already; name another folder with --out")
    return args


def main(argv: list[str] | None = None) -> int:
    a = Acceptance(arguments(argv))
    a.out.mkdir(parents=True, exist_ok=True)
    for number, folder in enumerate(a.control_folders, 1):
        draw(folder, IMAGES, seed=number)
    a.part("names and shapes", lambda: names_and_shapes(a))
    a.part("an image", lambda: drawn(a))
    a.part("the image beside diffusers'", lambda: beside(a, "image.png", "image-diffusers.png"))
    a.part("training", lambda: trained(a))
    a.part("the LoRA read back", lambda: read_back(a))
    a.part("the LoRA's image beside diffusers'", lambda: with_lora(a))
    failed = [name for name, part in a.found.items() if part["result"] == "failed"]
    report = {
        "checkpoint": a.args.checkpoint.name,
        "result": f"failed: {', '.join(failed)}" if failed else "accepted",
        "options": {k: v for k, v in vars(a.args).items() if k not in ("checkpoint", "out", "beside", "set")},
        "settings": [setting.partition("=")[0] for setting in a.args.set],
        "parts": a.found,
        "machine": machine(a.args.device),
    }
    hidden = {str(a.out): "OUT", str(a.args.beside): "BESIDE", str(a.args.checkpoint.parent): "FOLDER"}
    report = without_paths(report, hidden | {str(Path.home()): "~"})
    (a.out / "report.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    (a.out / "report.txt").write_text(text(report))
    print(f"{report['result']}; send {a.out / 'report.json'}, and the images beside it if you like")
    return 1 if failed else 0


def with_lora(a: Acceptance) -> dict[str, Any]:
    """diffusers' image with the LoRA in diffusers' names, beside ours."""
    a.passed("the LoRA read back")
    (file,) = (a.out / "run").glob("lora*diffusers*.safetensors")
    return beside(a, "image-lora.png", "image-lora-diffusers.png", file)


if __name__ == "__main__":
    sys.exit(main())
