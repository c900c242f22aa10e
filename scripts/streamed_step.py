"""What a step costs with its blocks streamed from the host: beside the resident step, and beside the link's own rate.

    python scripts/streamed_step.py [--model flux-dev] [--quantize fp8] [--shares 0.25 0.5 1.0] [--device cuda]

Each row is a share of the blocks. `ratio` is its time over the resident step's, both captured.
`link` is the time in which the bytes of a step, each block forward and backward, cross the link at the rate that a copy
of a whole block has by itself. Prints JSON; the trained values of all rows must have the same bits, or it exits with 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.mode import deterministic
from flame_train.tools.bench import BenchCase, gib, predicted, prepare

WARM, TIMED, COPIED = 3, 10, 256 << 20


def milliseconds(fn: Callable[[], object], backend: Backend) -> float:
    """The median time of a call, until the device is done."""
    times = []
    for _ in range(WARM + TIMED):
        backend.synchronize()
        begin = time.perf_counter()
        fn()
        backend.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM:]) * 1e3


def link_rate(backend: Backend) -> float:
    """Bytes a second from pinned memory to the device."""
    there = backend.empty((COPIED,), np.dtype(np.uint8))
    held = backend.offload(there, keep=True)
    return COPIED / milliseconds(lambda: held.fetch(there)(), backend) * 1e3


def row(case: BenchCase, share: float, rate: float) -> tuple[dict[str, Any], bytes]:
    """The measurements of a share, and the trained values after its steps."""
    settings = (f"model.offload={share}",) if share else ()
    case = replace(case, settings=settings)
    foretold = predicted(case) if case.device != "cpu" else None
    p = prepare(case)
    p.backend.reset_peak()
    step = p.captured()
    taken = {"share": share, "ms": round(milliseconds(step, p.backend), 3), "host_gib": gib(p.backend.host_bytes)}
    peak = p.backend.memory().peak
    taken["peak_gib"] = None if peak is None else gib(peak)
    if foretold is not None:
        taken["predicted_gib"] = gib(foretold.peak)
    taken["link_ms"] = round(2 * p.backend.host_bytes / rate * 1e3, 3)
    values: bytes = p.backend.to_host(p.state.optimizer.arena.values).tobytes()
    return taken, values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux-dev")
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--quantize", default="fp8", choices=["off", "fp8"])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.25, 0.5, 1.0])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    backend = get_backend(args.device)
    case = BenchCase(
        args.model,
        args.resolution,
        checkpointing="full",
        quantize=args.quantize,
        device=args.device,
        precision="fp32" if args.device == "cpu" else "bf16",
    )
    rate, rows, values = link_rate(backend), [], set()
    with deterministic(True):
        for share in (0.0, *args.shares):
            taken, trained = row(case, share, rate)
            rows.append(taken | {"ratio": round(taken["ms"] / rows[0]["ms"], 4) if rows else 1.0})
            values.add(trained)
            gc.collect()
            backend.empty_cache()
    print(json.dumps({"card": backend.card, "link_gb_per_s": round(rate / 1e9, 2), "rows": rows}, indent=1))
    if len(values) > 1:
        print("the trained values differ between shares", file=sys.stderr)
    return int(len(values) > 1)


if __name__ == "__main__":
    sys.exit(main())
