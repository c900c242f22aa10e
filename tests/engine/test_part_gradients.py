"""Gradients of parts of a tensor that is also used whole, which are added where the whole's gradient stands."""

from __future__ import annotations

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F

PARTS = [slice(1, 3), (slice(None), 0), (..., slice(None, None, 2)), (slice(None), None, -1), [0, 2, 0], (0, [1, 1])]


@pytest.mark.parametrize("index", PARTS, ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_a_part_adds_to_the_gradient_of_the_whole(index: object, times: int) -> None:
    """A first one that others refer to stays as it was, and later ones may be written over."""
    rng = np.random.default_rng(0)
    x = flame.tensor(rng.standard_normal((4, 3)), "float64", requires_grad=True)
    root = x * 1.0
    given = flame.tensor(rng.standard_normal((4, 3)), "float64")
    kept = given.numpy().copy()
    parts = [root[index] for _ in range(times)]
    weights = [flame.tensor(rng.standard_normal(part.shape), "float64") for part in parts]
    (found,) = flame.grad([root, *parts], [x], [given, *weights])
    want = kept.copy()
    for weight in weights:
        np.add.at(want, index, weight.numpy())
    np.testing.assert_allclose(found.numpy(), want, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(given.numpy(), kept)


def test_narrow_too() -> None:
    x = flame.tensor(np.arange(12.0).reshape(4, 3), requires_grad=True)
    whole = x * 2.0
    total = (whole * whole).sum() + F.narrow(whole, 0, 1, 2).sum()
    (found,) = flame.grad([total], [x])
    want = 8.0 * x.numpy()
    want[1:3] += 2.0
    np.testing.assert_array_equal(found.numpy(), want)
