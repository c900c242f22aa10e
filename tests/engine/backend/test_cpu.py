"""The CPU's memory: the peak is the system's own, not what happened to be there when it was asked."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator

import pytest

from flame_train.engine.backend import host_memory as rss
from flame_train.engine.backend.cpu import CpuBackend

_MIB = 1 << 20


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    """One whose peak begins here, as it does again for whoever comes next; what others left is given back first."""
    gc.collect()
    gc.disable()
    made = CpuBackend()
    made.reset_peak()
    yield made
    made.reset_peak()
    gc.enable()


def _touch(mib: int) -> None:
    """Takes that much for a moment, from the system: what was freed before may lie ready for an array."""
    with mmap.mmap(-1, mib * _MIB) as room:
        for page in range(0, len(room), mmap.PAGESIZE):
            room[page] = 1


def test_the_peak_is_seen_though_nobody_looked(backend: CpuBackend) -> None:
    before = backend.memory().live
    _touch(300)
    found = backend.memory()
    assert found.live < before + 50 * _MIB
    assert found.peak is not None
    assert 290 * _MIB < found.peak - before < 350 * _MIB


def test_a_reset_forgets_what_was(backend: CpuBackend) -> None:
    _touch(300)
    backend.reset_peak()
    before = backend.memory().live
    _touch(100)
    peak = backend.memory().peak
    assert peak is not None
    assert 90 * _MIB < peak - before < 150 * _MIB


@pytest.mark.parametrize("clear", ["/no/such/file", "/dev/null"])
def test_where_the_mark_cannot_be_reset_there_is_no_figure_until_it_rises(
    backend: CpuBackend, clear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = backend.memory().live
    _touch(200)
    monkeypatch.setattr(rss, "_CLEAR", clear)
    backend.reset_peak()
    _touch(100)
    assert backend.memory().peak is None
    _touch(300)
    peak = backend.memory().peak
    assert peak is not None
    assert 290 * _MIB < peak - before < 350 * _MIB


def test_systems_without_proc_tell_the_most_of_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    by_proc = rss.high_water()
    monkeypatch.setattr(rss, "_STATUS", "/no/such/file")
    by_usage = rss.high_water()
    assert by_proc is not None
    assert by_usage is not None
    assert by_proc - _MIB < by_usage < 1 << 40


def test_no_mark_is_no_figure(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rss, "high_water", lambda: None)
    backend.reset_peak()
    assert backend.memory().peak is None
