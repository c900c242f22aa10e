"""Items through a pipeline: all of them, in batches, and what is done when something stands in the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flame_train.run.encode.encoders import Pipeline


class Work:
    """A pipeline that squares numbers, and what was read, computed and kept."""

    def __init__(self, overlapped: bool, spoiled: int | None = None, unwritable: int | None = None) -> None:
        self.read, self.batches, self.kept = list[int](), list[list[int]](), dict[int, int]()
        self.spoiled, self.unwritable = spoiled, unwritable
        self.pipeline = Pipeline[int, int](self._ready, self._start, self._keep, overlapped)

    def _ready(self, item: int) -> int:
        if item == self.spoiled:
            raise ValueError(f"{item} cannot be read")
        self.read.append(item)
        return item

    def _start(self, batch: Sequence[int]) -> Callable[[], list[dict[str, Any]]]:
        self.batches.append(list(batch))
        return lambda: [{"square": np.array(n * n)} for n in batch]

    def _keep(self, item: int, example: dict[str, Any]) -> None:
        if item == self.unwritable:
            raise OSError(f"{item} cannot be written")
        self.kept[item] = int(example["square"])


BATCHES = [[0, 1, 2], [3], [4, 5], [6, 7, 8], [9]]


@pytest.mark.parametrize("overlapped", [False, True])
def test_every_item_is_kept_with_what_is_its_own(overlapped: bool) -> None:
    work, done = Work(overlapped), list[int]()
    work.pipeline.run(BATCHES, done.append)
    assert work.batches == BATCHES
    assert work.kept == {n: n * n for n in range(10)}
    assert done[-1] == 10
    assert done == sorted(done)


@pytest.mark.parametrize("overlapped", [False, True])
def test_nothing_to_do_is_done(overlapped: bool) -> None:
    work = Work(overlapped)
    work.pipeline.run([], lambda done: None)
    assert work.kept == {}


@pytest.mark.parametrize("overlapped", [False, True])
def test_being_stopped_keeps_all_that_was_said_to_be_done(overlapped: bool) -> None:
    work, told = Work(overlapped), list[int]()

    def stop(done: int) -> None:
        told.append(done)
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.pipeline.run(BATCHES, stop)
    assert sorted(work.kept) == list(range(told[-1]))


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_item_that_cannot_be_read_costs_none_before_it(overlapped: bool) -> None:
    work = Work(overlapped, spoiled=5)
    with pytest.raises(ValueError, match="5 cannot be read"):
        work.pipeline.run(BATCHES, lambda done: None)
    assert sorted(work.kept) == [0, 1, 2, 3]


@pytest.mark.parametrize("overlapped", [False, True])
def test_what_cannot_be_written_is_told(overlapped: bool) -> None:
    work = Work(overlapped, unwritable=4)
    with pytest.raises(OSError, match="4 cannot be written"):
        work.pipeline.run(BATCHES, lambda done: None)
    assert {0, 1, 2, 3} <= set(work.kept)


def test_only_some_are_read_ahead_of_the_device() -> None:
    """A dataset may be larger than memory."""
    work = Work(overlapped=True)
    most = list[int]()
    usual = work.pipeline._start

    def start(batch: Sequence[int]) -> Callable[[], list[dict[str, Any]]]:
        most.append(len(work.read) - sum(map(len, work.batches)))
        return usual(batch)

    work.pipeline._start = start  # type: ignore[method-assign]
    work.pipeline.run([[2 * n, 2 * n + 1] for n in range(500)], lambda done: None)
    assert len(work.kept) == 1000
    assert max(most) <= 40


def test_a_batch_is_begun_before_the_one_before_it_is_waited_for() -> None:
    events = list[str]()
    lock = threading.Lock()

    def note(text: str) -> None:
        with lock:
            events.append(text)

    def start(batch: Sequence[int]) -> Callable[[], list[dict[str, Any]]]:
        note(f"begin {batch[0]}")

        def wait() -> list[dict[str, Any]]:
            note(f"end {batch[0]}")
            return [{}]

        return wait

    Pipeline[int, int](lambda n: n, start, lambda n, example: None, True).run([[0], [1], [2]], lambda done: None)
    assert events == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "end 2"]
