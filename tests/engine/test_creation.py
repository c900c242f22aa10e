"""New tensors: values and dtypes as PyTorch's, random numbers by seed and counter, settings of one thread alone."""

from __future__ import annotations

import doctest
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.dtype import bfloat16, float16, float32, float64, int64
from flame_train.engine.mode import capturing, device, mode
from flame_train.engine.tensors import creation, generator
from flame_train.errors import ShapeError

CALLS: list[Callable[[Any], Any]] = [
    lambda t: t.zeros(2, 3),
    lambda t: t.zeros((2, 3)),
    lambda t: t.ones(4),
    lambda t: t.ones(()),
    lambda t: t.full((2,), 3),
    lambda t: t.full((2,), 3.5),
    lambda t: t.full((2,), True),
    lambda t: t.arange(5),
    lambda t: t.arange(2.0),
    lambda t: t.arange(1, 10, 3),
    lambda t: t.arange(10, 1, -3),
    lambda t: t.arange(0, 1, 0.1),
    lambda t: t.arange(3, 3),
    lambda t: t.linspace(0, 1, 11),
    lambda t: t.linspace(-3.0, 8.0, 7),
    lambda t: t.linspace(2, 5, 1),
    lambda t: t.linspace(2, 5, 0),
    lambda t: t.eye(3),
    lambda t: t.eye(2, 4),
    lambda t: t.zeros_like(t.arange(3)),
    lambda t: t.ones_like(t.eye(2)),
    lambda t: t.full_like(t.arange(3), 7),
]


@pytest.mark.parity
@pytest.mark.parametrize("call", CALLS)
def test_values_and_dtypes_are_pytorchs(call: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = call(flame), call(torch)
    assert str(theirs.dtype) == f"torch.{ours.dtype.name}"
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6, atol=1e-7)


def test_examples_hold() -> None:
    assert doctest.testmod(creation, extraglobs={"manual_seed": flame.manual_seed}).failed == 0
    drawn = {"rand": flame.rand, "randn": flame.randn}
    assert doctest.testmod(generator, extraglobs=drawn).attempted > 4
    assert doctest.testmod(generator, extraglobs=drawn).failed == 0


def test_a_seed_starts_over_and_the_counter_goes_on() -> None:
    flame.manual_seed(11)
    first, second = flame.randn(3, 4), flame.randn(3, 4)
    assert not np.array_equal(first.numpy(), second.numpy())
    flame.manual_seed(11)
    assert np.array_equal(first.numpy(), flame.randn(3, 4).numpy())
    g = flame.Generator(11)
    assert np.array_equal(first.numpy(), flame.randn(3, 4, generator=g).numpy())
    assert g.counter == 1
    g.counter = 0
    assert np.array_equal(first.numpy(), flame.randn((3, 4), generator=g).numpy())
    flame.manual_seed(12)
    assert not np.array_equal(first.numpy(), flame.randn(3, 4).numpy())


def test_a_generator_on_a_device_draws_the_same_numbers() -> None:
    host, there = flame.Generator(5), flame.Generator(5, device="cpu")
    for _ in range(3):
        assert np.array_equal(flame.rand(7, generator=host).numpy(), flame.rand(7, generator=there).numpy())
    assert host.counter == there.counter == 3


def test_distributions() -> None:
    flame.manual_seed(1)
    x = flame.randn(200_000).numpy()
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1.0) < 0.01
    assert abs((x**4).mean() - 3.0) < 0.1
    u = flame.rand(200_000).numpy()
    assert 0.0 < u.min() < u.max() < 1.0
    np.testing.assert_allclose(np.histogram(u, 10, (0, 1))[0] / 20_000, 1.0, atol=0.05)
    i = flame.randint(-2, 4, (60_000,)).numpy()
    np.testing.assert_allclose(np.bincount(i + 2) / 10_000, np.ones(6), atol=0.06)


@pytest.mark.parametrize("dtype", [float64, float32, bfloat16, float16], ids=lambda d: d.name)
def test_rand_stays_below_one_in_every_precision(dtype: Any) -> None:
    assert flame.rand(100_000, dtype=dtype).numpy().astype(np.float64).max() < 1.0


def test_settings_outlast_the_block_in_which_they_were_set() -> None:
    flame.manual_seed(4)
    with flame.no_grad():
        first = flame.randn(5)
        flame.set_default_dtype("bfloat16")
    assert mode().grad
    assert not np.array_equal(first.numpy(), flame.randn(5).numpy())
    assert flame.zeros(2).dtype == flame.tensor([1.0]).dtype == flame.randn(2).dtype == bfloat16
    assert flame.tensor(np.ones(2)).dtype == float64
    assert flame.arange(3).dtype == int64


def test_what_one_thread_sets_no_other_sees() -> None:
    flame.manual_seed(9)
    flame.set_default_device("cuda:1")
    flame.set_default_dtype("float64")
    seen = []
    thread = threading.Thread(target=lambda: seen.append((mode().device, mode().dtype, mode().seed)))
    thread.start()
    thread.join()
    assert seen == [("cpu", float32, 0)]
    assert mode().device == "cuda:1"
    with device("cpu"):
        assert flame.zeros(1).device == "cpu"


def test_every_test_starts_anew() -> None:
    """Whatever the tests above set."""
    assert (mode().device, mode().dtype, mode().seed, mode().drawn) == ("cpu", float32, 0, 0)


def test_a_captured_step_draws_from_a_generator_on_the_device_alone() -> None:
    g = flame.Generator(2, device="cpu")
    with capturing():
        for draw in (lambda: flame.randn(2), lambda: flame.rand(2, generator=flame.Generator(1))):
            with pytest.raises(RuntimeError, match="the same random numbers at each replay"):
                draw()
        first, second = flame.randn(2, generator=g), flame.randn(2, generator=g)
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(
    ("mistake", "error", "match"),
    [
        (lambda: flame.zeros(2.5), TypeError, "zeros: expected ints as sizes, got 2.5"),
        (lambda: flame.ones(-1), ShapeError, "ones: expected sizes of at least 0, got -1"),
        (lambda: flame.full((2,), "x"), TypeError, "full: expected a number as fill_value, got str"),
        (lambda: flame.arange(0, 5, 0), ValueError, "arange: expected a step from 0 towards 5, got 0"),
        (lambda: flame.arange(0, 5, -1), ValueError, "arange: expected a step"),
        (lambda: flame.randn(2, dtype="int64"), TypeError, "randn: expected a floating dtype, got int64"),
        (lambda: flame.randint(3, 3, (2,)), ValueError, "randint: expected high above low"),
        (lambda: flame.randint(0.5, (2,)), TypeError, "randint: expected an int high, got 0.5"),
        (lambda: flame.manual_seed("x"), TypeError, "a seed: expected an int, got 'x'"),
        (lambda: flame.set_default_dtype("int64"), TypeError, "expected a floating dtype, got int64"),
        (lambda: flame.arange(3, requires_grad=True), TypeError, "only floating tensors can require grad"),
    ],
)
def test_mistakes_are_told(mistake: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        mistake()
