"""Whether several processes train what one trains with as many times the accumulation, and twice the same bytes.

    flame-train quickstart QUICKSTART --device cuda
    python scripts/equal_ranks.py QUICKSTART FOLDER [--ranks 2] [--steps 50] [--device cuda]

The processes are started by `--gpus`, twice, by torchrun where it is installed, and on GPUs also all on one by MPI. In
one run more the last process is killed after a checkpoint, and half as many go on. In fp32 the LoRA must agree within
1e-5 of each tensor's largest value, in bf16 the loss of each step within 1e-3. Each line is what was compared, with the
largest difference. On GPUs the last says the memory of the process with the most, and what `--dry-run` predicts,
without NCCL's own. Exits with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from kill_and_continue import ranks_of

from flame_train.io.safetensors import SafetensorsFile

TENSORS, LOSSES = 1e-5, 1e-3
"""The largest difference of a LoRA's values in terms of their tensor's largest, and of the losses of a step."""


@dataclass(frozen=True)
class Runs:
    """Runs of one config in a folder, by name."""

    config: Path
    folder: Path
    steps: int
    device: str

    def command(self, name: str, precision: str, accumulation: int, *more: str) -> list[str]:
        settings = {
            "output.dir": str(self.folder / name),
            "train.steps": str(self.steps),
            "train.precision": precision,
            "gradient.accumulation": str(accumulation),
            "output.precision": "fp32",
            "sample.every": "0",
        }
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return ["-m", "flame_train", "train", "--config", str(self.config), "--device", self.device, *given, *more]

    def run(self, launcher: Sequence[str], command: Sequence[str], **environ: str) -> str:
        """What the command printed. Ends the program where it fails."""
        ended = subprocess.run([*launcher, *command], capture_output=True, text=True, env=os.environ | environ)
        if ended.returncode:
            sys.exit(f"{' '.join([*launcher, *command])} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
        return ended.stdout

    def lora(self, name: str) -> dict[str, np.ndarray[Any, Any]]:
        with SafetensorsFile(self.folder / name / "lora.safetensors") as file:
            return {tensor: np.array(file.read(tensor)) for tensor in file.names}

    def log(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "log.jsonl").read_text().splitlines()]

    def farthest(self, one: str, other: str) -> float:
        """The largest difference of two LoRAs, in terms of each tensor's largest value."""
        a, b = self.lora(one), self.lora(other)
        return max(float(np.abs(a[name] - b[name]).max() / max(np.abs(a[name]).max(), 1e-30)) for name in a | b)


def killed_and_moved(runs: Runs, ranks: int) -> None:
    """Trains with all processes, kills the last after a checkpoint, and continues with half as many."""
    every, few = ("--set", f"checkpoint.every={max(1, runs.steps // 3)}"), max(ranks // 2, 1)
    command = [sys.executable, *runs.command("moved", "fp32", 1, *every, "--gpus", str(ranks))]
    launched = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while launched.poll() is None and not any((runs.folder / "moved").glob("checkpoints/step-*")):
        time.sleep(0.005)
    started = psutil.Process(launched.pid).children(recursive=True)
    if not (last := ranks_of(started).get(ranks - 1)):
        sys.exit("moved: the run ended before its last process could be killed; give it more --steps")
    os.kill(last, signal.SIGKILL)
    launched.wait()
    psutil.wait_procs(started)
    print(f"rank {ranks - 1} killed after step {runs.log('moved')[-1]['step']} of {runs.steps}", flush=True)
    runs.run([sys.executable], runs.command("moved", "fp32", 1, *every, *(("--gpus", str(few)) if few > 1 else ())))


def compare(runs: Runs, ranks: int) -> bool:
    """Trains, compares and prints. Returns whether all holds."""
    python, several = [sys.executable], ["--gpus", str(ranks)]
    runs.run(python, runs.command("one", "fp32", ranks))
    ways = {"mpirun": (python, several, {}), "mpirun-again": (python, several, {})}
    torchrun = shutil.which("torchrun")
    if torchrun and runs.device != "cpu":
        ways["torchrun"] = ([torchrun, "--nproc-per-node", str(ranks)], [], {})
    if runs.device != "cpu":
        ways["one-gpu-by-mpi"] = (python, [*several, "--collectives", "mpi"], {"CUDA_VISIBLE_DEVICES": "0"})
    held = True
    for name, (launcher, more, environ) in ways.items():
        runs.run(launcher, runs.command(name, "fp32", 1, *more), **environ)
        held &= said(f"{name} against one process, fp32", runs.farthest("one", name), TENSORS)
    killed_and_moved(runs, ranks)
    held &= said(f"killed, and continued on {ranks // 2}, fp32", runs.farthest("one", "moved"), TENSORS)
    a, b = runs.lora("mpirun"), runs.lora("mpirun-again")
    held &= said("mpirun twice, tensors with other bytes", sum(a[n].tobytes() != b[n].tobytes() for n in a), 0)
    for name, accumulation, more in (("one-bf16", ranks, []), ("mpirun-bf16", 1, several)):
        runs.run(python, runs.command(name, "bf16", accumulation, *more))
    pairs = zip(runs.log("one-bf16"), runs.log("mpirun-bf16"), strict=True)
    held &= said("losses of a step, bf16", max(abs(x["loss"] - y["loss"]) for x, y in pairs), LOSSES)
    if runs.device == "cpu":  # what is predicted is a GPU's
        return held
    plan = json.loads(runs.run(python, runs.command("planned", "bf16", 1, *several, "--dry-run", "--json")))
    taken = runs.log("mpirun-bf16")[-1]["memory"] / 2**30
    print(f"memory of the process with the most: {taken:.2f} GiB, predicted {plan['predicted_memory_gib']}")
    return held


def said(what: str, found: float, bound: float) -> bool:
    """Prints a difference. Returns whether it is within its bound."""
    held = found <= bound
    print(f"{what}: {found:.3g}, at most {bound:g}: {'holds' if held else 'DOES NOT HOLD'}", flush=True)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.quickstart / "config.toml", args.folder.resolve(), args.steps, args.device)
    sys.exit(0 if compare(runs, args.ranks) else 1)


if __name__ == "__main__":
    main()
