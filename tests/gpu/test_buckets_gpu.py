"""A run over many buckets: each has a captured step, and all of them share one pool."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from flame_train.data.buckets import BucketRule
from flame_train.engine import capture
from flame_train.tools import bench
from flame_train.training.batch import Batch
from flame_train.training.step import micro, update

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("model", "rule", "most"),
    [
        ("sdxl-tiny", BucketRule(512), 20),
        ("sd3-tiny", BucketRule(128, 16, 64, 192), 6),
        ("flux-tiny", BucketRule(512), 6),
    ],
)
def test_many_buckets_neither_grow_nor_are_captured_again(model: str, rule: BucketRule, most: int) -> None:
    """In the order of a run: a bucket's first step comes after others' were captured, and works in their memory."""
    case, runs = bench.BenchCase(model, resolution=rule.resolution, batch=2, rank=4), []
    p = bench.prepare(case)
    p.backend.empty_cache()  # what other tests' graphs have left
    before = p.backend.memory().live
    after = capture(lambda: update(p.state), "cuda")
    steps: list[Callable[[], None]] = []
    for bucket in sorted(rule.buckets, key=math.prod, reverse=True)[:most]:
        here = bench.random_batch(p.model, case, bucket)
        batch = Batch(here, p.backend, p.state.dtype)
        batch.fill(here)

        def step(batch: Batch = batch) -> None:
            runs.append(batch)
            micro(p.state, batch)

        steps.append(capture(step, "cuda"))
    assert len(steps) == most
    live, peaks = [], []
    for i, run in enumerate(steps):
        for _ in range(2):
            run()
            after()
        p.backend.synchronize()
        if not i:
            p.backend.reset_peak()  # the first step of all ran before there was a graph
        peaks.append(p.backend.memory().peak)
    for _ in range(3):
        for run in steps:
            run()
            after()
        p.backend.synchronize()
        live.append(p.backend.memory().live)
    assert len(runs) == 2 * len(steps)  # once eager, once captured
    assert live[0] == live[1] == live[2]
    taken = peaks[0] - before
    assert max(peaks) - peaks[0] < 0.1 * taken  # tables and batches of buckets come on top, but no second step
    assert np.isfinite(p.backend.to_host(p.state.figures)).all()
