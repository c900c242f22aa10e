"""Killed at any moment, a run that is started again ends in the same bytes as one that was left alone."""

from __future__ import annotations

import os
import random

import pytest

SEEDS = int(os.environ.get("FLAME_TEST_KILLS", "25"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_at_random_times_and_continued(job, whole, seconds, seed):
    rng = random.Random(seed)
    ended = job.train(kill_after=rng.uniform(0.0, 1.1 * seconds))
    while ended.code == -9 and rng.random() < 0.3:
        ended = job.train(kill_after=rng.uniform(0.0, seconds))
    assert ended.code in (0, -9), ended.stderr

    assert job.finish() == whole
    assert job.debris() == []
