"""Milliseconds a step and images a second of several GPUs, beside one of them, for steps of published size.

    mpirun -n 2 python scripts/scaling.py [--steps sdxl:1 sdxl:4 flux-dev:1] [--torch] [--set gradient.all_reduce=bf16]
    mpirun -n 2 python scripts/scaling.py --checkpointing full --set model.offload=1.0
    torchrun --nproc-per-node 2 scripts/scaling.py
    python scripts/scaling.py
    python scripts/scaling.py --simulate

A row a step, as `flame-train bench step --gpus N` measures it: the step by itself and with the sum of the gradients,
by turns. `share` is images a second of N GPUs in terms of N times one. `--torch` times PyTorch's
DistributedDataParallel around the same step with compiled blocks. A single process has a communicator of one, and
`share` says what that costs. Rank 0 prints a JSON line a row.

`--simulate` needs no GPU. It reckons the share of N GPUs from the steps of `docs/step_times.json` and published
bandwidths of NCCL. The sum is counted whole, as it runs after the backward pass, and nothing else is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.join import join
from flame_train.engine.backend import get_backend
from flame_train.tools.bench import BenchCase
from flame_train.tools.bench.process_times import measure

SHOWN = (
    *("model", "batch", "settings", "processes", "one_ms", "ms", "sum_ms", "images_per_s", "share"),
    *("peak_gib", "predicted_gib", "host_gib", "torch", "ratio"),
)
"""Of what was measured, what a row has."""

STEPS = ("sdxl:1", "sdxl:4", "flux-dev:1", "zimage:1", "krea2:1")

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
    parser.add_argument(
        "--steps", nargs="+", default=["sdxl:1", "sdxl:4", "flux-dev:1", "zimage:1", "krea2:1"], metavar="MODEL:BATCH"
    )
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--checkpointing", default="off")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--collectives", default="auto")
    parser.add_argument("--simulate", action="store_true")
    asked = parser.parse_args()
    if asked.simulate:
        for row in simulated():
            print(json.dumps(row))
        return
    group, device = join(asked.device, asked.collectives)
    if group.world == 1 and device != "cpu":
        backend: Any = get_backend(device)
        group = ProcessGroup(0, 1, backend.nccl(0, 1, backend.nccl_identifier()))
    for step in asked.steps:
        name, _, batch = step.partition(":")
        case = BenchCase(
            name,
            asked.resolution,
            batch=int(batch or 1),
            checkpointing=asked.checkpointing,
            device=device,
            settings=asked.set,
        )
        row = measure(case, group, "torch-compiled" if asked.torch else None)
        get_backend(device).empty_cache()
        if group.leads:
            print(json.dumps({key: value for key, value in row.items() if key in SHOWN}), flush=True)


if __name__ == "__main__":
    main()
