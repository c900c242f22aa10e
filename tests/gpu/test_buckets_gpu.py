"""A run over many buckets: each has a captured step, and all of them share one pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flame_train.data.buckets import BucketRule
from flame_train.engine import capture
from flame_train.tools import bench
from flame_train.training.batch import Batch
from flame_train.training.step import micro, update

pytestmark = pytest.mark.gpu


def test_twenty_buckets_neither_grow_nor_are_captured_again() -> None:
    trial, runs = bench.Trial("sdxl-tiny", resolution=512, rank=4), []
    p = bench.prepare(trial)
    after = capture(lambda: update(p.state), "cuda")
    steps: list[Callable[[], None]] = []
    for bucket in BucketRule(512).buckets[:20]:
        here = bench.random_batch(p.subject, p.network, trial, bucket)
        batch = Batch(here, p.backend, p.state.dtype)
        batch.fill(here)

        def step(batch: Batch = batch) -> None:
            runs.append(batch)
            micro(p.state, batch)

        steps.append(capture(step, "cuda"))
    assert len(steps) == 20
    live = []
    for _ in range(4):
        for run in steps:
            run()
            after()
        p.backend.synchronize()
        live.append(p.backend.memory().live)
    assert len(runs) == 2 * len(steps)  # once eager, once captured
    assert live[1] == live[2] == live[3]
    assert np.isfinite(p.backend.get(p.state.figures)).all()
