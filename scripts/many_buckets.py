"""A run over many buckets, each with a captured step of its own: memory and time, bucket by bucket.

    python scripts/many_buckets.py [--model NAME] [--batch N] [--buckets K] [--rounds R]

Every bucket's step is captured as a run does it, the update between the steps; then all are replayed in turns. Prints a
JSON line a bucket and one for the rounds. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from flame_train.data.buckets import BucketRule
from flame_train.engine import capture
from flame_train.tools import bench
from flame_train.tools.bench.models import names
from flame_train.training.batch import Batch
from flame_train.training.step import micro, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sdxl", choices=names())
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--buckets", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    case = bench.BenchCase(args.model, resolution=args.resolution, batch=args.batch)
    p = bench.prepare(case)
    after = capture(lambda: update(p.state), "cuda")
    steps: list[Callable[[], None]] = []
    memory = p.backend.memory
    for height, width in sides(args.resolution)[: args.buckets]:
        here = bench.random_batch(p.model, case, (height, width))
        batch = Batch(here, p.backend, p.state.dtype)
        batch.fill(here)
        steps.append(capture(lambda batch=batch: micro(p.state, batch), "cuda"))
        for _ in range(2):
            steps[-1]()
            after()
        p.backend.synchronize()
        found = memory()
        gib = {"live_gib": round(found.live / 2**30, 3), "peak_gib": round(found.peak / 2**30, 3)}
        print(json.dumps({"bucket": f"{width}x{height}", **gib}), flush=True)
    seconds = []
    for _ in range(args.rounds):
        begin = time.monotonic()
        for step in steps:
            step()
            after()
        p.backend.synchronize()
        seconds.append(round(time.monotonic() - begin, 3))
    found = memory()
    gib = {"live_gib": round(found.live / 2**30, 3), "peak_gib": round(found.peak / 2**30, 3)}
    print(json.dumps({"rounds_s": seconds, "steps": len(steps), **gib}))


def sides(resolution: int) -> list[tuple[int, int]]:
    """(height, width) of a resolution's buckets, the most square first."""
    return sorted(BucketRule(resolution).buckets, key=lambda side: abs(np.log(side[0] / side[1])))


if __name__ == "__main__":
    main()
