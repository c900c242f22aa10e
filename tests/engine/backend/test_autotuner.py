"""Which way is the fastest, by a clock that the test turns."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda import autotuner
from flame_train.engine.backend.cuda.autotuner import Autotuner


class Clock:
    """CuPy's events over a time that only the ways move."""

    def __init__(self) -> None:
        self.now = 0.0
        clock = self

        class Event:
            def record(self, stream: Any) -> None:
                self.at = clock.now

        self.cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda a, b: b.at - a.at)
        self.empty = lambda n, dtype: np.zeros(8, dtype)

    def way(self, *times: float) -> Any:
        left = list(times)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.mark.parametrize(
    ("ways", "best"),
    [
        ([[5.0], [4.0], [3.0], [6.0]], 2),
        ([[5.0], [4.95]], 0),  # no more than noise
        ([[5.0], [9.0, 9.0, 3.0]], 1),  # slow once: a clock rate, a page fault
        ([[5.0], [1.0, 1.0, 8.0]], 0),  # fast once
        ([[5.0]], 0),
    ],
)
def test_the_fastest_of_the_medians(ways: list[list[float]], best: int) -> None:
    clock = Clock()
    watch = Autotuner(clock, SimpleNamespace(synchronize=lambda: None))
    assert watch.fastest([clock.way(*times) for times in ways]) == best


def test_what_is_hopeless_runs_twice() -> None:
    """A plan of a library may take a hundred times the best one's time, of which nine runs are a minute a network."""
    clock, runs = Clock(), [0, 0, 0]
    ways = []
    for i, ms in enumerate((20.0, 5.0, 21.0)):
        way = clock.way(ms)
        ways.append(lambda way=way, i=i: (way(), runs.__setitem__(i, runs[i] + 1)))
    assert Autotuner(clock, SimpleNamespace(synchronize=lambda: None)).fastest(ways) == 1
    assert runs[2] == 2 < runs[0] == runs[1]


def test_what_the_host_takes_to_queue_is_not_held_against_it() -> None:
    clock = Clock()
    ways = [clock.way(0.1), clock.way(0.9, 0.9, 0.05)]
    assert Autotuner(clock, SimpleNamespace(synchronize=lambda: None)).fastest(ways) == 1


def test_the_device_is_kept_busy_for_as_long_as_the_host_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, fills = Clock(), list[int]()
    clock.empty = lambda n, dtype: SimpleNamespace(fill=lambda value: fills.append(n))
    for seconds, each in ((0.0, 1), (80e-6, 6)):
        ticks = itertools.count()
        host = SimpleNamespace(perf_counter=lambda ticks=ticks, taken=seconds: next(ticks) * taken)
        monkeypatch.setattr(autotuner, "time", host)
        fills.clear()
        Autotuner(clock, SimpleNamespace(synchronize=lambda: None)).fastest([clock.way(1.0), clock.way(2.0)])
        assert len(fills) == each * 2 * autotuner._ROUNDS
