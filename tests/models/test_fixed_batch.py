"""What a batch of one fixed size gives of an item, whatever stands beside it: NumPy as if it worked by itself."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.engine.backend.cpu import CpuBackend
from flame_train.engine.dtype import float32
from flame_train.networks.fixed_batch import FixedBatches

pytestmark = pytest.mark.bytes

WEIGHT = np.random.default_rng(0).standard_normal((6, 5), np.float32)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each batch that was computed; the CPU takes several items at once."""
    monkeypatch.setattr(CpuBackend, "asynchronous", True)
    return []


def batches(sizes: list[int], size: int = 4) -> FixedBatches:
    def fn(given: Any) -> Any:
        sizes.append(given["x"].shape[0])
        return {"y": F.linear(given["x"], tensor(WEIGHT))}

    return FixedBatches(fn, lambda item: {"y": ((*item["x"].shape[:-1], 6), float32)}, lambda _: size, "cpu")


def items(count: int, rows: int = 3) -> list[dict[str, Any]]:
    rng = np.random.default_rng(rows)
    return [{"x": rng.standard_normal((rows, 5), np.float32)} for _ in range(count)]


def test_each_item_gets_its_own_results_and_missing_ones_are_filled_up(sizes: list[int]) -> None:
    found, given = batches(sizes), items(3)
    for each in (given, given[:1], given[1:]):
        for item, made in zip(each, found.start(each)(), strict=True):
            np.testing.assert_allclose(made["y"], item["x"] @ WEIGHT.T, rtol=1e-5)
    assert sizes == [4, 4, 4]


def test_an_item_is_the_same_bytes_alone_and_in_any_company(sizes: list[int]) -> None:
    found, given = batches(sizes), items(4)
    alone = [found.start([item])()[0]["y"].tobytes() for item in given]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [1, 3, 1]):
        assert [y["y"].tobytes() for y in found.start([given[i] for i in order])()] == [alone[i] for i in order]


def test_results_stay_when_the_next_batch_is_computed(sizes: list[int]) -> None:
    found, given = batches(sizes, 2), items(4)
    first, second = found.start(given[:2]), found.start(given[2:])
    for item, made in zip(given, [*first(), *second()], strict=True):
        np.testing.assert_allclose(made["y"], item["x"] @ WEIGHT.T, rtol=1e-5)


def test_every_shape_has_buffers_of_its_own(sizes: list[int]) -> None:
    found = batches(sizes)
    for rows in (3, 7, 3):
        (item,) = items(1, rows)
        np.testing.assert_allclose(found.start([item])()[0]["y"], item["x"] @ WEIGHT.T, rtol=1e-5)


def test_a_device_that_gains_nothing_takes_them_one_by_one() -> None:
    taken: list[int] = []
    found = batches(taken)
    found.start(items(1))()
    assert taken == [1]
    with pytest.raises(ValueError, match="at most 1 items, got 2"):
        found.start(items(2))


def test_results_of_another_shape_than_announced_are_a_mistake(sizes: list[int]) -> None:
    wrong = FixedBatches(lambda given: {"y": given["x"]}, lambda _: {"y": ((3, 6), float32)}, lambda _: 2, "cpu")
    with pytest.raises(ValueError, match=r"y: expected \(2, 3, 6\) float32, got \(2, 3, 5\) float32"):
        wrong.start(items(1))


def test_nothing_of_it_outlives_it(sizes: list[int]) -> None:
    """A graph that waited for the collector would keep its memory through training."""
    found = batches(sizes)
    found.start(items(2))()
    gone = weakref.ref(next(iter(found._programs.values())))
    enabled = gc.isenabled()
    gc.disable()
    try:
        del found
        assert gone() is None
    finally:
        if enabled:
            gc.enable()
