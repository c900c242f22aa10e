"""How tensors meet the row and reduction kernels: what `shared` and `extent` say, against NumPy's own broadcasting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flame_train.engine.dtype import bfloat16
from flame_train.engine.ops.common.row_kernels import extent, shared, why_not_reduction, why_not_rows

SHAPE = (2, 3, 4, 5)


@pytest.mark.parametrize("own", [(5,), (1, 5), (4, 5), (3, 1, 5), (3, 4, 5), (2, 1, 1, 5), (2, 3, 4, 5), (2, 3, 1, 5)])
def test_a_row_of_the_whole_is_the_shared_row_that_broadcasting_takes(own: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(own)
    found = shared(x, SHAPE)
    assert found is not None
    run, count = found
    rows = x.reshape(-1, SHAPE[-1])
    whole = np.broadcast_to(x, SHAPE).reshape(-1, SHAPE[-1])
    np.testing.assert_array_equal(np.stack([rows[r // run % count] for r in range(len(whole))]), whole)


@pytest.mark.parametrize("own", [(1,), (4, 1), (2, 1, 4, 5), (1, 2, 3, 4, 5)])
def test_other_patterns_are_told_apart(own: tuple[int, ...]) -> None:
    assert shared(np.zeros(own), SHAPE) is None


@pytest.mark.parametrize("dims", [d for n in range(5) for d in itertools.combinations(range(4), n)])
def test_the_extent_of_a_reduction_takes_its_elements_together(dims: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 1, 5))
    e = extent(x.shape, dims)
    if e is None:
        assert {0, 3} <= set(dims)
        assert 1 not in dims  # two dims with one between that stays
        return
    np.testing.assert_allclose(x.reshape(e.outer, e.reduced, e.inner).sum(1).ravel(), x.sum(dims).ravel())


def test_what_the_kernels_cannot_take_is_said() -> None:
    assert why_not_rows(np.zeros((2, 3)), 1) == "no kernel for float64"
    assert "nothing to compute with" in why_not_rows(np.zeros((0, 3), np.float32), 1)
    assert why_not_rows(np.zeros((2, 1), bfloat16), 1) == "rows of one element"
    assert "longer than" in why_not_rows(np.zeros((1, 1 << 17), bfloat16), 1)
    assert why_not_rows(np.zeros((2, 640), bfloat16), 1) == ""
    assert why_not_reduction(np.zeros((2, 3)), (0,)) == "no kernel for float64"
    assert why_not_reduction(np.zeros((0, 3), np.float32), (0,)) == "nothing to compute with"
    assert why_not_reduction(np.zeros((2, 3, 4), np.float32), (0, 2)) == "the dims are not neighbours"
