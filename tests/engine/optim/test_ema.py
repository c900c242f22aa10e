"""The moving average of trained values, beside one written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flame_train.engine import Parameter, capture
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16
from flame_train.engine.optim import EMA, AdamWRule, FlatParameters, Optimizer, SGDRule

DECAY = 0.3


def make(rule=None, compute_dtype=None) -> Optimizer:
    ps = [Parameter(np.linspace(-1, 1, n, dtype=np.float32), f"p{n}") for n in (5, 70)]
    return Optimizer(
        FlatParameters(ps, get_backend("cpu"), compute_dtype=compute_dtype),
        [rule or SGDRule()],
        lr=0.1,
        average=EMA(DECAY),
    )


def give(o: Optimizer, value: float, i: int = 0) -> None:
    o.zero_grad()
    for p in o.arena.parameters.values():
        p.grad.data[...] = np.random.default_rng(i).standard_normal(p.shape) * value


def averages(o: Optimizer) -> dict[str, np.ndarray]:
    return {n.removeprefix("average.values."): a for n, a in o.state_dict().items() if n.startswith("average.")}


def test_it_follows_the_formula() -> None:
    """Early on it follows closely, however slow it is meant to be in the end."""
    o, mean = make(), None
    for n in range(6):
        give(o, 1.0, n)
        o.step()
        values = o.arena.parameters["p5"].numpy().astype(np.float64)
        decay = min(DECAY, (1 + n) / (10 + n))
        mean = values if mean is None else decay * mean + (1 - decay) * values
        np.testing.assert_allclose(averages(o)["p5"], mean, rtol=1e-6, atol=1e-7)


def test_a_skipped_step_moves_nothing() -> None:
    o = make(AdamWRule())
    for n, size in enumerate((1.0, 1.0)):
        give(o, size, n)
        o.step()
    before = averages(o)
    give(o, math.inf)
    o.step()
    for name, array in averages(o).items():
        np.testing.assert_array_equal(array, before[name])


def test_it_stands_in_for_the_values_and_gives_way_again() -> None:
    """The compute copies, which the network reads, go with it."""
    o = make(compute_dtype=bfloat16)
    for n in range(3):
        give(o, 1.0, n)
        o.step()
    trained, mean = o.arena.state(), averages(o)
    with o.averaged():
        for name, p in o.arena.parameters.items():
            np.testing.assert_array_equal(p.numpy(), mean[name])
            np.testing.assert_array_equal(
                p.compute_copy.float().numpy(), mean[name].astype(bfloat16).astype(np.float32)
            )
    with pytest.raises(KeyError), o.averaged():
        raise KeyError("whatever goes wrong meanwhile")
    for name, p in o.arena.parameters.items():
        np.testing.assert_array_equal(p.numpy(), trained[name])
        np.testing.assert_array_equal(p.compute_copy.float().numpy(), trained[name].astype(bfloat16).astype(np.float32))


def test_without_one_the_values_stand_for_themselves() -> None:
    ps = [Parameter(np.ones(3, np.float32), "p")]
    o = Optimizer(FlatParameters(ps, get_backend("cpu")), [SGDRule()], lr=0.1)
    with o.averaged():
        np.testing.assert_array_equal(ps[0].numpy(), 1.0)


def test_a_continued_average_is_the_uninterrupted_one() -> None:
    whole, first, second = make(), make(), make()
    for n in range(4):
        give(whole, 1.0, n)
        whole.step()
    for n in range(4):
        o = first if n < 2 else second
        if n == 2:
            second.arena.load_state(first.arena.state())
            second.load_state_dict(first.state_dict())
        give(o, 1.0, n)
        o.step()
    for name, array in averages(whole).items():
        np.testing.assert_array_equal(averages(second)[name], array)


def test_a_captured_step_keeps_it() -> None:
    eager, captured = make(), make()
    step = capture(captured.step, "cpu")
    for n in range(3):
        give(eager, 1.0, n)
        eager.step()
        give(captured, 1.0, n)
        step()
    np.testing.assert_array_equal(averages(eager)["p70"], averages(captured)["p70"])


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, math.nan])
def test_a_decay_that_averages_nothing_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        EMA(decay)
