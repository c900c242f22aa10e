"""Predicted memory beside what this machine's GPU takes: steps of published size, and whole runs on empty checkpoints.

    python scripts/predicted_memory.py FOLDER [--only PATTERN] [--steps | --runs] [--workspaces]

Each case runs in a process of its own. Steps are `bench step`'s, captured; weights of whole runs are zeros that take no
room on disk (`random_checkpoint.py --empty`), and everything is encoded first. `--workspaces` also prints what each
plan of cuDNN's works in, where the rule of a run on shapes says something else. Exits with 1 where a prediction is more
than 3 % off. On an H200 with all kernels compiled some eight minutes.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from full_run import COMMANDS, config, draw
from random_checkpoint import parts_of, tensors, write_empty, write_words

from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.optimizers import OPTIMIZERS
from flame_train.tools.bench import BenchCase, predicted, prepare

GIB, WITHIN = 2**30, 0.03
_8_BITS: dict[str, Any] = {"quantize": "fp8", "deterministic": False}
STEPS: dict[str, dict[str, Any]] = {
    "sdxl, batch 1": {},
    "sdxl, batch 4": {"batch": 4},
    "sdxl, batch 8": {"batch": 8},
    "sdxl, batch 4, not deterministic": {"batch": 4, "deterministic": False},
    "sdxl, mlp checkpointing": {"checkpointing": "mlp"},
    "sdxl, checkpointing": {"checkpointing": "full"},
    "sdxl, offloading": {"checkpointing": "offload"},
    "sdxl, rank 64, fp16": {"rank": 64, "precision": "fp16"},
    "sdxl, fp32, 512 pixels": {"precision": "fp32", "resolution": 512},
    "sdxl, base in 8 bits": _8_BITS,
    "sd35-medium, batch 4": {"model": "sd35-medium", "batch": 4},
    "sd35-medium, checkpointing": {"model": "sd35-medium", "batch": 4, "checkpointing": "full"},
    "sd35-large": {"model": "sd35-large"},
    "sd35-large, 8 bits": {"model": "sd35-large", "arithmetic": "fp8", **_8_BITS},
    "flux": {"model": "flux-dev"},
    "flux, not deterministic": {"model": "flux-dev", "deterministic": False},
    "flux, checkpointing": {"model": "flux-dev", "checkpointing": "full"},
    "flux, offloading": {"model": "flux-dev", "checkpointing": "offload"},
    "flux, 8 bits": {"model": "flux-dev", "arithmetic": "fp8", **_8_BITS},
    "flux, base in 8 bits, checkpointing": {"model": "flux-dev", "checkpointing": "full", **_8_BITS},
    "flux, base in 8 bits, all blocks streamed": {
        "model": "flux-dev",
        "checkpointing": "full",
        "settings": ("model.offload=1.0",),
        **_8_BITS,
    },
    "sdxl, half of the blocks streamed": {"checkpointing": "full", "settings": ("model.offload=0.5",)},
    "flux, int8": {"model": "flux-dev", **_8_BITS, "quantize": "int8", "arithmetic": "int8"},
    "flux, base in 4 bits": {"model": "flux-dev", **_8_BITS, "quantize": "nf4"},
    "flux, base in 4 bits, checkpointing": {"model": "flux-dev", "checkpointing": "full", **_8_BITS, "quantize": "nf4"},
    "sdxl, int8": {**_8_BITS, "quantize": "int8", "arithmetic": "int8"},
    "sdxl, base in 4 bits, checkpointing": {"checkpointing": "full", **_8_BITS, "quantize": "nf4"},
    # Of rank 128, checkpointed: so that state is a good part of it.
    **{
        f"sdxl, {name}": {"optimizer": name, "rank": 128, "checkpointing": "full", "resolution": 512}
        for name in OPTIMIZERS
    },
}
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sdxl, first run": ("sdxl", ("sample.every=0",)),
    "sdxl, grids": ("sdxl", ()),
    "sdxl, batch 4, average, grids": ("sdxl", ("data.batch_size=4", "train.ema_decay=0.999")),
    "sdxl, checkpointing, first run": ("sdxl", ("gradient.checkpointing=full", "sample.every=0")),
    "sdxl, grids in bf16": ("sdxl", ("model.vae_precision=bf16",)),
    "sd35-medium, batch 4, grids": ("sd35-medium", ("data.batch_size=4",)),
    "sd35-large, 8 bits, grids": ("sd35-large", ("model.quantize=fp8", "model.arithmetic=fp8")),
    "flux, base and T5 in 8 bits, checkpointing, grids": (
        "flux-dev",
        ("model.quantize=fp8", "text_encoders.precision=fp8", "gradient.checkpointing=full"),
    ),
    "flux, grids": ("flux-dev", ()),
}


def measure_step(case: BenchCase) -> dict[str, Any]:
    """Bytes predicted and taken by a captured step, and cuDNN's workspaces that the rule does not meet."""
    foretold, backend = predicted(case).peak, get_backend("cuda")
    with deterministic(case.deterministic):
        p = prepare(case)
        backend.reset_peak()
        p.step()
        p.captured()
        backend.synchronize()
    return {"predicted": foretold, "took": backend.memory().peak, "plans": _plans(backend)}


def _plans(backend: Any) -> list[str]:
    """cuDNN's plans of more than 64 MiB, as they are known to it."""
    kept = backend.kernels.__dict__.get("cudnn")
    plans = {} if kept is None else kept._plans
    return [f"{p.workspace / 2**20:8.1f} MiB {key}" for key, p in plans.items() if p.workspace > 64 << 20]


def measure_run(folder: Path, model: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """Bytes predicted for a whole run with nothing cached, and taken by it."""
    base = folder / model
    if not (base / "base.safetensors").exists():
        base.mkdir(parents=True, exist_ok=True)
        made = tensors(parts_of(model, t5=True), "")
        write_empty(base / "base.safetensors", made)
        write_words(base, made)
    images, out = folder / "images", folder / "run"
    draw(images, 4)
    for old in (out, images / ".flame-cache"):
        shutil.rmtree(old, ignore_errors=True)
    file = folder / "run.toml"
    file.write_text(config(base / "base.safetensors", images, out, 4))
    command = [sys.executable, "-m", "flame_train", COMMANDS[model], "--config", str(file)]
    command += [f"--set={setting}" for setting in settings]
    plan = subprocess.run([*command, "--dry-run", "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    return {"predicted": json.loads(plan)["predicted_memory_gib"] * GIB, "took": last["memory"], "plans": []}


def _apart(arguments: list[str]) -> dict[str, Any] | None:
    """What this script answers in a process of its own; None if that fails, which it has said then."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", help="a glob over the cases' names")
    parser.add_argument("--steps", action="store_true", help="steps alone")
    parser.add_argument("--runs", action="store_true", help="whole runs alone")
    parser.add_argument("--workspaces", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.one in STEPS:
        print(json.dumps(measure_step(BenchCase(**STEPS[args.one]))))
        return
    if args.one:
        print(json.dumps(measure_run(folder, *RUNS[args.one])))
        return
    folder.mkdir(parents=True, exist_ok=True)
    cases = [*([] if args.runs else STEPS), *([] if args.steps else RUNS)]
    worst = 0.0
    print(f"{'GiB':<52} {'predicted':>10} {'took':>8}")
    for name in fnmatch.filter(cases, args.only):
        found = _apart([str(folder), "--one", name])
        if found is None:
            worst = 1.0
            print(f"{name:<52} failed", flush=True)
            continue
        off = found["predicted"] / found["took"] - 1
        worst = max(worst, abs(off))
        mark = "  <--" if abs(off) > WITHIN else ""
        foretold, took = found["predicted"] / GIB, found["took"] / GIB
        print(f"{name:<52} {foretold:>10.2f} {took:>8.2f} {off:>+7.1%}{mark}", flush=True)
        for plan in found["plans"] if args.workspaces else []:
            print(f"    {plan}")
    print(f"largest difference {worst:.1%}")
    sys.exit(worst > WITHIN)


if __name__ == "__main__":
    main()
