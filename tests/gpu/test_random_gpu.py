"""Random numbers are the same bits on the GPU and on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.backend import get_backend
from flame_train.engine.random import Rng, bits, normal_of

pytestmark = pytest.mark.gpu


def same(host: np.ndarray[Any, Any], device: Any) -> bool:
    got = get_backend("cuda").to_host(device)
    return got.dtype == host.dtype and got.tobytes() == host.tobytes()


@pytest.mark.parametrize("seed", [0, 42, 2**63 + 5, -3])
@pytest.mark.parametrize("count", [0, 1, 7, 4096])
def test_words(seed: int, count: int) -> None:
    xp, samples = get_backend("cuda").xp, np.array([0, 5, 2**31 + 1, 2**32 - 1], np.int64)
    for step in (0, 3, np.asarray(2**32 - 1, np.int64), np.asarray(7, np.int32)):
        there = step if isinstance(step, int) else xp.asarray(step)
        assert same(bits(np, seed, 9, step, samples, count), bits(xp, seed, 9, there, xp.asarray(samples), count))


def test_draws() -> None:
    xp = get_backend("cuda").xp
    here, there = Rng(np, 7, 2, np.arange(3)), Rng(xp, 7, xp.asarray(2), xp.arange(3))
    for shape in ((), (5,), (64, 64, 4)):
        assert same(here.uniform(20, shape), there.uniform(20, shape))
        assert same(here.normal(20, shape), there.normal(20, shape))
        assert same(here.randint(20, 1000, shape), there.randint(20, 1000, shape))


def test_normals_of_all_regions() -> None:
    xp, rng = get_backend("cuda").xp, np.random.default_rng(0)
    edges = np.concatenate([np.arange(70_000), 2**32 - 1 - np.arange(70_000), 2**31 + np.arange(-500, 500)])
    words = np.concatenate([edges, rng.integers(0, 2**32, 1_000_000)]).astype(np.uint32)
    assert same(normal_of(np, words), normal_of(xp, xp.asarray(words)))


def test_new_tensors_hold_the_same_numbers() -> None:
    for draw in (
        lambda device, g: flame.randn(3, 1001, device=device, generator=g),
        lambda device, g: flame.rand(77, device=device, generator=g, dtype="bfloat16"),
        lambda device, g: flame.randint(-5, 9, (4, 33), device=device, generator=g),
    ):
        assert same(draw("cpu", flame.Generator(3)).numpy(), draw("cuda", flame.Generator(3)).data)
        assert same(draw("cpu", flame.Generator(3)).numpy(), draw("cuda", flame.Generator(3, device="cuda")).data)


def test_other_new_tensors_are_the_same() -> None:
    for make in (
        lambda device: flame.linspace(-3, 8, 1001, device=device),
        lambda device: flame.arange(0, 1, 0.01, device=device),
        lambda device: flame.arange(10, -3, -2, device=device),
        lambda device: flame.eye(3, 5, device=device, dtype="float16"),
        lambda device: flame.full((2, 3), True, device=device),
        lambda device: flame.zeros(0, 3, device=device),
    ):
        assert same(make("cpu").numpy(), make("cuda").data)


def test_a_captured_step_draws_anew_at_each_replay() -> None:
    g = flame.Generator(4, device="cuda")
    out = flame.zeros(9, device="cuda")
    step = flame.capture(lambda: out.copy_(flame.randn(9, device="cuda", generator=g)), "cuda")
    host = flame.Generator(4)
    for _ in range(4):
        step()
        assert same(flame.randn(9, generator=host).numpy(), out.data)
    assert g.counter == 4
