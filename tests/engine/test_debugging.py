"""The op that made NaN or infinity is named with its line; the backward pass is shown op by op."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.mode import capturing
from flame_train.errors import NonFiniteError


def leaf(*values: float) -> flame.Tensor:
    return flame.tensor(np.array(values, np.float32), requires_grad=True)


def test_the_first_op_forward_is_named_with_the_users_line() -> None:
    x = leaf(1.0, -1.0)
    match = r"log made nan, forward, .*: \(2,\) float32 -> \(2,\) float32"
    with flame.detect_anomaly(), pytest.raises(NonFiniteError, match=match) as error:
        (x + 0.0).log().exp().sum()  # the guilty line
    assert "the guilty line" in str(error.value)
    assert re.search(r"test_debugging\.py:\d+:", str(error.value))


def test_the_first_op_backward_is_named_with_the_users_line() -> None:
    x = leaf(4.0, 0.0)
    with flame.detect_anomaly():
        y = x.sqrt()  # infinite slope at 0
        total = (y * 2.0).sum()
        with pytest.raises(NonFiniteError, match="sqrt made inf, backward, of finite values") as error:
            total.backward()
    assert "infinite slope at 0" in str(error.value)


def test_inside_a_checkpoint_too() -> None:
    x = leaf(4.0, 0.0)

    def block(t: flame.Tensor) -> flame.Tensor:
        return t.sqrt()  # inside the block

    with flame.detect_anomaly():
        total = flame.checkpoint(block, x).sum()
        with pytest.raises(NonFiniteError, match=r"sqrt made inf, backward.*inside the block"):
            total.backward()


def test_what_is_finite_or_was_infinite_before_passes() -> None:
    x = leaf(1.0, 2.0, math.inf)
    with flame.detect_anomaly():
        (x * 2.0).sum().backward()
        masked = F.masked_fill(leaf(1.0, 2.0), flame.tensor([True, False]), -math.inf)
        masked.softmax(0).sum().backward()
    with flame.no_grad():
        leaf(-1.0).log()  # outside nobody looks


def test_a_captured_step_is_refused() -> None:
    with flame.detect_anomaly(), capturing(), pytest.raises(RuntimeError, match="run the step without capture"):
        leaf(1.0).exp()


def test_a_trace_shows_shapes_norms_and_lines() -> None:
    x, w = leaf(3.0, 4.0), leaf(1.0, 2.0)
    with flame.trace() as found:
        ((x * w) * 2.0).sum().backward()  # the traced line
    assert [row.op for row in found.rows] == ["sum", "mul", "mul"]
    product = found.rows[-1]
    assert (product.grads, product.sent) == (((2,),), ((2,), (2,)))
    assert product.grad_norms == pytest.approx((math.sqrt(8.0),))
    assert product.sent_norms == pytest.approx((math.sqrt(20.0), 10.0))
    assert all("the traced line" in row.line for row in found.rows)
    assert all(row.ms >= 0.0 for row in found.rows)
    assert len(found.table().splitlines()) == 4
    (x * w).sum().backward()
    assert len(found.rows) == 3
