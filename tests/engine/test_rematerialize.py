"""Values made again instead of kept: the same gradients to the last bit, from less memory."""

from __future__ import annotations

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.memory_report import saved_by_op


def leaf(*shape: int, seed: int = 0) -> flame.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return flame.tensor(values, requires_grad=True)


def plain(fn, *args):
    return fn(*args)


def squashed(x: flame.Tensor, times: float) -> flame.Tensor:
    return F.tanh(x) * times


def network(make, x: flame.Tensor, w: flame.Tensor, v: flame.Tensor) -> flame.Tensor:
    """Two products of one value that is cheap to make, and one of a list of them."""
    h = make(squashed, F.linear(x, w), 3.0)
    return F.linear(h, w).square() + F.linear(F.cat([h, make(F.silu, h)], dim=-1), v)


def run(make, wrapped: bool = False) -> tuple[list[bytes], dict[str, int]]:
    x, w, v = leaf(8, 16), leaf(16, 16, seed=1), leaf(16, 32, seed=2)
    out = flame.checkpoint(network, make, x, w, v) if wrapped else network(make, x, w, v)
    kept = saved_by_op(out)
    out.sum().backward()
    return [t.grad.numpy().tobytes() for t in (x, w, v)], kept


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a checkpoint"])
def test_gradients_are_the_same_bits(wrapped: bool) -> None:
    assert run(flame.rematerialize, wrapped)[0] == run(plain, wrapped)[0]


def test_what_is_made_again_is_not_kept() -> None:
    x, w = leaf(8, 16), leaf(4, 16, seed=1)
    size = 8 * 16 * 4
    y = x * 2.0
    assert sum(saved_by_op(F.linear(F.silu(y), w)).values()) == 2 * size  # silu's input and its result
    assert sum(saved_by_op(F.linear(flame.rematerialize(F.silu, y), w)).values()) == size


def test_only_the_ops_that_want_it_make_it_and_each_once() -> None:
    calls = 0

    def counted(x: flame.Tensor) -> flame.Tensor:
        nonlocal calls
        calls += 1
        return F.silu(x)

    h = flame.rematerialize(counted, leaf(3, 4))
    (F.linear(h, leaf(2, 4)).sum() + h.sum() + (h * flame.tensor(2.0)).sum()).backward()
    assert calls == 2  # at first, and for the weight of the linear layer


def test_what_is_made_of_it_is_made_from_the_beginning() -> None:
    """Of a chain nothing but its first argument is kept, and no bit changes."""
    size = 8 * 16 * 4
    eye = flame.tensor(np.eye(16, dtype=np.float32))

    def chain(make) -> tuple[list[bytes], int]:
        x, w = leaf(8, 16), leaf(4, 16, seed=1)
        out = F.linear(make(F.silu, make(F.linear, x * 2.0, eye)), w)
        kept = sum(saved_by_op(out).values()) - eye.data.nbytes
        out.square().sum().backward()
        return [x.grad.numpy().tobytes(), w.grad.numpy().tobytes()], kept

    assert chain(flame.rematerialize) == (chain(plain)[0], size)  # what the first linear layer is given
    assert chain(plain)[1] == 2 * size  # silu's input and its result


@pytest.mark.parametrize("fn", [F.tanh, lambda x: F.tanh(x).reshape(4, 3)], ids=["itself", "a view of it"])
def test_what_is_kept_anyway_is_not_made_again(fn) -> None:
    """tanh keeps its result for its own gradient: whoever else wants it finds it there."""
    calls = 0

    def counted(x: flame.Tensor) -> flame.Tensor:
        nonlocal calls
        calls += 1
        return fn(x)

    h = flame.rematerialize(counted, leaf(3, 4) * 2.0)
    out = F.linear(h, leaf(2, h.shape[-1]))
    assert sum(saved_by_op(out).values()) == h.data.nbytes
    out.sum().backward()
    assert calls == 1


def test_only_what_is_not_kept_anyway_is_made_again() -> None:
    """Of two in a row the first is there, so the second is made of it and not from the beginning."""
    calls = []

    def counted(fn):
        return lambda x: calls.append(fn) or fn(x)

    kept = flame.rematerialize(counted(F.tanh), leaf(3, 4) * 2.0)
    h = flame.rematerialize(counted(F.silu), kept)
    out = F.linear(h, leaf(2, 4))
    assert sum(saved_by_op(out).values()) == kept.data.nbytes
    out.sum().backward()
    assert calls == [F.tanh, F.silu, F.silu]


def test_a_checkpoint_makes_it_once_more_and_no_third_time() -> None:
    calls = 0

    def counted(x: flame.Tensor) -> flame.Tensor:
        nonlocal calls
        calls += 1
        return F.silu(x)

    w = leaf(2, 4)
    flame.checkpoint(lambda x: F.linear(flame.rematerialize(counted, x), w), leaf(3, 4)).sum().backward()
    assert calls == 2


def test_without_gradients_nothing_is_noted() -> None:
    with flame.no_grad():
        assert flame.rematerialize(F.silu, leaf(3))._remat is None


def test_gradients_of_a_lora_over_it() -> None:
    def gradients(make) -> list[bytes]:
        x, down, up = leaf(5, 8), leaf(2, 8, seed=1), leaf(6, 2, seed=2)
        frozen = flame.tensor(np.ones((6, 8), np.float32))
        F.lora_linear(make(F.layer_norm, x, (8,)), frozen, None, down, up, 0.5).square().sum().backward()
        return [t.grad.numpy().tobytes() for t in (x, down, up)]

    assert gradients(flame.rematerialize) == gradients(plain)


def test_small_results_are_kept() -> None:
    size = 3 * 4 * 4
    assert flame.rematerialize(F.silu, leaf(3, 4) * 2.0, min_bytes=size + 1)._remat is None
    assert flame.rematerialize(F.silu, leaf(3, 4) * 2.0, min_bytes=size)._remat is not None
