"""Milliseconds a step and images a second of several GPUs, beside one of them, for steps of published size.

    mpirun -n 2 python scripts/scaling.py [--steps sdxl:1 sdxl:4 flux-dev:1] [--torch]
    torchrun --nproc-per-node 2 scripts/scaling.py
    python scripts/scaling.py --simulate

Each process first times its own step alone, all at the same time, and then the step with one sum of the gradients over
all. `share` is images a second of N GPUs in terms of N times one. `--torch` times PyTorch's DistributedDataParallel
around the same step with compiled blocks; it needs torchrun's variables. Rank 0 prints a JSON line a row.

`--simulate` needs no GPU. It reckons the share of N GPUs from the steps of `docs/step_times.json` and published
bandwidths of NCCL. The sum is counted whole, as it runs after the backward pass, and nothing else is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.join import join
from flame_train.engine import capture
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.mode import deterministic
from flame_train.tools.bench import Prepared, Trial, prepare, torch_step
from flame_train.training.step import micro, reduce, update

WARM, TIMED = 5, 20

VALUES = 23.2e6
"""Trained values of a LoRA of rank 16 on SDXL, each 4 bytes."""
MACHINE = 8
"""GPUs on one machine."""
NVLINK = 370.0
"""GB/s of NCCL's ring over NVLink of an H100, as its authors say: github.com/NVIDIA/nccl-tests/issues/212.

NVLink SHARP reaches 480 with larger sums than these.
"""
NIC = 46.0
"""GB/s of one InfiniBand adapter of 400 Gbit/s, as NCCL's authors say: github.com/NVIDIA/nccl-tests/issues/290."""
DOUBLING = 0.047
"""Milliseconds of a sum of a few bytes on two machines: github.com/NVIDIA/nccl/issues/1244.

Each doubling of the machines is counted as much again, as in a tree: an assumption, and more than NCCL needs.
"""


def timed(run: Callable[[], None], backend: Backend) -> float:
    """Median milliseconds of a call."""
    taken = []
    for i in range(WARM + TIMED):
        backend.synchronize()
        begin = time.perf_counter()
        run()
        backend.synchronize()
        if i >= WARM:
            taken.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(taken)


def recorded(step: Callable[[], None], device: str) -> Callable[[], None]:
    """The step as a captured graph."""
    replay = capture(step, device)
    replay()
    replay()
    return replay


def whole_step(p: Prepared) -> Callable[[], None]:
    """Forward, backward, the sum over all processes, update: as the training loop launches them."""
    device = p.backend.name
    parts = [
        recorded(lambda: micro(p.state, p.batch), device),
        recorded(lambda: reduce(p.state), device) if p.state.group.captured else lambda: reduce(p.state),
        recorded(lambda: update(p.state), device),
    ]

    def step() -> None:
        for part in parts:
            part()

    return step


def measure(name: str, batch: int, device: str, group: ProcessGroup) -> dict[str, Any]:
    """The row of one model and batch size."""
    trial = Trial(model=name, batch=batch, device=device)
    backend = get_backend(device)
    with deterministic(trial.deterministic):
        alone = timed(whole_step(prepare(trial)), backend)
        backend.empty_cache()
        together = timed(whole_step(prepare(trial, group)), backend)
    backend.empty_cache()
    slowest_alone = max(map(float, group.all_gather(str(alone))))
    slowest = max(map(float, group.all_gather(str(together))))
    return {
        "model": name,
        "batch": batch,
        "gpus": group.world,
        "one_ms": round(slowest_alone, 3),
        "ms": round(slowest, 3),
        "images_per_s": round(batch * group.world / slowest * 1e3, 3),
        "share": round(slowest_alone / slowest, 4),
        "peak_gib": round(backend.memory().peak / 2**30, 2),
    }


def sum_ms(gpus: int, adapters: int) -> float:
    """Milliseconds of one sum of the gradients over `gpus`, with so many InfiniBand adapters a machine.

    A sum of S bytes takes 2 (N - 1) / N S / B, where B is NCCL's bus bandwidth (nccl-tests, PERFORMANCE.md).
    """
    machines = math.ceil(gpus / MACHINE)
    bandwidth = NVLINK if machines == 1 else min(NVLINK, adapters * NIC)
    return 2 * (gpus - 1) / gpus * 4 * VALUES / bandwidth / 1e6 + DOUBLING * math.log2(machines)


def simulated() -> Iterator[dict[str, Any]]:
    """A row for each measured step of SDXL, number of GPUs and network."""
    times = json.loads((Path(__file__).parents[1] / "docs" / "step_times.json").read_text())
    for row in times:
        if row["model"] != "SDXL" or row["program"] != "flame-train" or row["settings"]:
            continue
        for gpus in (8, 64, 512):
            for adapters in (8, 1):
                taken = sum_ms(gpus, adapters)
                yield {
                    "model": row["model"],
                    "batch": row["batch"],
                    "gpus": gpus,
                    "adapters": adapters if gpus > MACHINE else 0,
                    "sum_ms": round(taken, 2),
                    "share": round(row["ms"] / (row["ms"] + taken), 4),
                }
                if gpus <= MACHINE:
                    break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", default=["sdxl:1", "sdxl:4", "flux-dev:1"], metavar="MODEL:BATCH")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--collectives", default="auto")
    parser.add_argument("--simulate", action="store_true")
    asked = parser.parse_args()
    if asked.simulate:
        for row in simulated():
            print(json.dumps(row))
        return
    group, device = join(asked.device, asked.collectives)
    for step in asked.steps:
        name, _, batch = step.partition(":")
        row = measure(name, int(batch or 1), device, group)
        if asked.torch:
            theirs = torch_step(
                Trial(model=name, batch=int(batch or 1), device=f"cuda:{os.environ['LOCAL_RANK']}"), True
            )
            row |= {"torch_ddp_ms": max(map(float, group.all_gather(str(theirs["ms"]))))}
            row |= {"ratio": round(row["ms"] / row["torch_ddp_ms"], 4)}
        if group.leads:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
