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

`--simulate` needs no GPU. It reckons the share of machines of eight GPUs from the steps of `docs/step_times.json`, what
was measured on one machine, and published bandwidths of NCCL. Sums within a machine and between machines are counted
one after the other, and both after the backward pass.
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

TRAINED = {
    ("SDXL", 1): (23_224_320, 1.3),
    ("SDXL", 4): (23_224_320, 1.9),
    ("Flux dev", 1): (56_033_280, 2.5),
    ("Z-Image", 1): (31_334_400, 2.5),
    ("Krea 2", 1): (53_673_984, 2.5),
}
"""By model and batch: values of a LoRA of rank 16, and by how many milliseconds a step was longer on four GPUs.

The latter is of four H100s of one machine (docs/performance.md): the sum, and the wait for the slowest. Z-Image and
Krea 2 were not measured there, and have Flux's.
"""
GBYTE_OF_GBIT = 46.0 / 400
"""GB/s of NCCL for each Gbit/s of InfiniBand, as its authors say of 400: github.com/NVIDIA/nccl-tests/issues/290."""
NVLINK = 370.0
"""GB/s of NCCL's ring over NVLink of an H100, as its authors say: github.com/NVIDIA/nccl-tests/issues/212."""
DOUBLING = 0.047
"""Milliseconds of a sum of a few bytes on two machines: github.com/NVIDIA/nccl/issues/1244.

Each doubling of the machines is counted as much again, as in a tree: an assumption, and more than NCCL needs.
"""


def network_ms(values: int, machines: int, gbits: int) -> float:
    """Milliseconds that machines with so many Gbit/s each take for a sum of fp32 values, once each has its own.

    A sum of S bytes takes 2 (N - 1) / N S / B, where B is NCCL's bus bandwidth (nccl-tests, PERFORMANCE.md).
    """
    bandwidth = min(NVLINK, gbits * GBYTE_OF_GBIT)
    return 2 * (machines - 1) / machines * 4 * values / bandwidth / 1e6 + DOUBLING * math.log2(machines)


def simulated() -> Iterator[dict[str, Any]]:
    """A row for each measured step, number of machines and network."""
    times = json.loads((Path(__file__).parents[1] / "docs" / "step_times.json").read_text())
    of_one = {
        (row["model"], row["batch"]): row["ms"]
        for row in times
        if row["program"] == "flame-train" and row["deterministic"] and not row["settings"]
    }
    for machines, gbits in ((1, 0), *((machines, gbits) for machines in (2, 16) for gbits in (200, 400, 3200))):
        for (model, batch), (values, local) in TRAINED.items():
            network = network_ms(values, machines, gbits) if gbits else 0.0
            share = of_one[model, batch] / (of_one[model, batch] + local + network)
            row = {"machines": machines, "gbits": gbits, "model": model, "batch": batch}
            yield row | {"network_ms": round(network, 2), "share": round(share, 3)}


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
