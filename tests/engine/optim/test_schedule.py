"""Learning-rate curves at the points where their meaning is plain; parity is in tests/parity."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from flame_train.engine.optim import Schedule


def rate(schedule: Schedule, count: int, peak: float = 2.0) -> float:
    return float(schedule.rate(np, np.asarray(count), np.asarray(peak)))


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_restarts", "polynomial"])
def test_rises_from_zero_and_falls_to_the_floor_and_stays(name: str) -> None:
    s = Schedule(name, total=110, warmup=10, power=2.0, min_lr=0.5)
    assert rate(s, 0) == 0.0
    assert rate(s, 5) == pytest.approx(1.0)
    assert rate(s, 10) == pytest.approx(2.0)
    assert rate(s, 110) == pytest.approx(0.5)
    assert rate(s, 5000) == pytest.approx(0.5)
    curve = [rate(s, k) for k in range(10, 111)]
    assert all(a >= b for a, b in itertools.pairwise(curve))


def test_half_way_values() -> None:
    assert rate(Schedule("linear", total=100), 50) == pytest.approx(1.0)
    assert rate(Schedule("cosine", total=100), 25) == pytest.approx(1 + math.cos(math.pi / 4))
    assert rate(Schedule("polynomial", total=100, power=3.0), 50) == pytest.approx(0.25)
    assert rate(Schedule("cosine_restarts", total=100, cycles=4), 25) == pytest.approx(2.0)
    assert rate(Schedule("constant", warmup=4), 3) == pytest.approx(1.5)
    assert rate(Schedule("constant", warmup=4), 10**9) == 2.0
    assert rate(Schedule("inverse_sqrt", warmup=4, timescale=9), 13) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt"])
def test_a_longer_run_begins_with_the_same_bits(name: str) -> None:
    short, long = (Schedule(name, total=total, warmup=3, timescale=7) for total in (10, 1000))
    assert [rate(short, k) for k in range(20)] == [rate(long, k) for k in range(20)]


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="no schedule named 'cosin'"):
        Schedule("cosin", total=3)
    with pytest.raises(ValueError, match="number of updates"):
        Schedule("linear")
