"""Writing in place: what is refused rather than lost, and what a graph notices on its way back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import optim
from flame_train.engine.autograd.versions import VERSIONS
from flame_train.errors import ShapeError


def leaf(*shape: int) -> flame.Tensor:
    return flame.tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32), requires_grad=True)


def test_a_gradient_would_be_lost_by_writing_what_has_one() -> None:
    y = leaf(3) * 2.0
    buffer = flame.tensor(np.zeros((2, 3), np.float32))

    def bracket() -> None:
        buffer[0] = y

    def divide() -> None:
        buffer[1].div_(y)

    for write in (bracket, divide, lambda: buffer.copy_(y), lambda: buffer.add_(y), lambda: buffer.clamp_(max=y)):
        with pytest.raises(RuntimeError, match=r"its gradient would be lost.*detach\(\)"):
            write()
    assert not buffer.numpy().any()
    buffer[0] = y.detach()
    with flame.no_grad():
        buffer[1].copy_(y)
    np.testing.assert_array_equal(buffer.numpy(), np.stack([y.numpy()] * 2))


def test_an_optimizers_step_is_a_write() -> None:
    p, q = leaf(3), leaf(2)
    optimizer = optim.SGD([p], lr=0.1)
    z = (p * p).sum()
    other = (q * q).sum()
    (p * 2.0).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"mul: .* written in place"):
        z.backward()
    other.backward()
    (p * p).sum().backward()


def test_a_neighbour_in_the_same_buffer_is_not_what_was_kept() -> None:
    p, q = leaf(3), leaf(3)
    optim.SGD([("p", p), ("q", q)], lr=0.1)
    y, z = (p * p).sum(), (q * q).sum()
    with flame.no_grad():
        p.mul_(2.0)
    z.backward()
    with pytest.raises(RuntimeError, match="written in place"):
        y.backward()


def test_what_a_checkpoint_was_given_is_not_to_be_written() -> None:
    x = leaf(3)
    y = flame.checkpoint(lambda v: v * v, x)
    with flame.no_grad():
        x.mul_(10.0)
    with pytest.raises(RuntimeError, match=r"checkpoint: .* written in place"):
        y.sum().backward()


def test_places_that_a_graph_keeps_are_not_to_be_written() -> None:
    x, at = leaf(3), flame.tensor([0, 1])
    y = x[at]
    at.fill_(2)
    with pytest.raises(RuntimeError, match=r"getitem: .* written in place"):
        y.sum().backward()


def test_running_statistics_that_move_are_written() -> None:
    x = leaf(4, 3)
    mean, var = flame.tensor(np.zeros(3, np.float32)), flame.tensor(np.ones(3, np.float32))
    y = F.batch_norm(x, mean, var)
    F.batch_norm(x, mean, var, training=True)
    with pytest.raises(RuntimeError, match="written in place"):
        y.sum().backward()


def test_what_was_written_and_freed_is_forgotten() -> None:
    gc.collect()
    before = len(VERSIONS)
    for _ in range(3):
        flame.tensor([1.0, 2.0]).fill_(3.0)
    kept = flame.tensor(np.zeros((1000, 2), np.float32))
    for i in range(1000):
        kept[i] = 1.0
    assert len(VERSIONS) == before + 1


@pytest.mark.parametrize(
    ("write", "error", "match"),
    [
        (lambda x: x.copy_(3), TypeError, "copy_: expected a Tensor, got int"),
        (lambda x: x.copy_(flame.tensor([1.0, 2.0])), ShapeError, r"copy_: .*\(2,\).*\(3,\)"),
        (lambda x: x.__setitem__(0, None), TypeError, "expected a Tensor or a number, got NoneType"),
        (lambda x: x.__setitem__(slice(2), flame.tensor([1.0, 2.0, 3.0])), ShapeError, r"\(3,\)"),
        (lambda x: x.__iadd__(flame.tensor(np.ones((2, 3)))), ShapeError, r"\(2, 3\).*\(3,\)"),
    ],
)
def test_what_cannot_be_written(write: Callable[[flame.Tensor], None], error: type[Exception], match: str) -> None:
    x = flame.tensor([1.0, 2.0, 3.0])
    with pytest.raises(error, match=match):
        write(x)
    np.testing.assert_array_equal(x.numpy(), [1, 2, 3])


def test_augmented_assignment_on_a_graph_binds_the_name_to_a_new_tensor() -> None:
    """As loops write it: sums of losses, a residual added to what was computed."""
    p = leaf(3)
    total = flame.tensor(0.0)
    for k in (2.0, 3.0):
        total += (p * k).sum()
    h = p * 2.0
    before = h
    h += 1.0
    h *= p
    total += h.sum()
    total /= 2.0
    total.backward()
    np.testing.assert_allclose(p.grad.numpy(), (5.0 + 4.0 * p.numpy() + 1.0) / 2.0, rtol=1e-6)
    np.testing.assert_array_equal(before.numpy(), 2.0 * p.numpy())
    low = (p * 1.0).to("bfloat16")
    low += p
    assert low.dtype == flame.tensor([0.0], "bfloat16").dtype


def test_augmented_assignment_that_no_name_can_take_is_refused() -> None:
    p, buffer = leaf(3), flame.tensor(np.zeros((2, 3), np.float32))
    with pytest.raises(RuntimeError, match="not written in place"):
        p += 1.0
    with pytest.raises(RuntimeError, match=r"its gradient would be lost"):
        buffer[0] += p
    h = p * 1.0
    with pytest.raises(ShapeError, match=r"\(2, 3\).*\(3,\)"):
        h += buffer
