"""What is measured on the card and kept on disk: the same results, found once, refused where damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.backend.cuda.autotuner import AutotuneCache, Autotuner
from flame_train.engine.backend.cuda.libraries.cublaslt import CublasLt
from flame_train.engine.backend.cuda.libraries.cudnn import CuDnn
from flame_train.engine.mode import deterministic

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[True, False], ids=["by rule", "measured"])
def exact(request: pytest.FixtureRequest) -> Iterator[bool]:
    with deterministic(request.param):
        yield request.param


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the backend libraries that have seen nothing, over one cache."""
    kernels = get_backend("cuda").kernels
    stream = get_backend("cuda").stream
    cache = AutotuneCache(tmp_path, "this card")

    def renew() -> AutotuneCache:
        monkeypatch.setitem(kernels.__dict__, "cublaslt", CublasLt(kernels.xp, stream, cache, kernels.launch_hooks))
        monkeypatch.setitem(
            kernels.__dict__, "cudnn", CuDnn(kernels.xp, stream, cache, kernels.launch_hooks, kernels.workspace)
        )
        return cache

    renew()
    return renew


def numbers(*shape: int, seed: int = 0) -> flame.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape)
    return flame.tensor(values, "bfloat16", "cuda", requires_grad=True)


def product() -> list[np.ndarray]:
    return [F.linear(numbers(512, 640), numbers(320, 640, seed=1)).float().numpy()]


def convolution() -> list[np.ndarray]:
    x = numbers(2, 16, 16, 64)
    y = F.conv2d(x, numbers(96, 64, 3, 3, seed=1), numbers(96, seed=2), 1, 1, layout="NHWC")
    return [y.float().numpy(), flame.grad(y, x, numbers(*y.shape, seed=3))[0].float().numpy()]


def attention() -> list[np.ndarray]:
    q, k, v = (numbers(2, 4, 256, 64, seed=i) for i in range(3))
    y = F.scaled_dot_product_attention(q, k, v)
    return [y.float().numpy(), *(g.float().numpy() for g in flame.grad(y, (q, k, v), numbers(*y.shape, seed=3)))]


WORK = [product, convolution, attention]


@pytest.mark.parametrize("work", WORK)
def test_what_was_kept_gives_the_same_bits_and_is_not_measured_again(
    fresh: Any, exact: bool, monkeypatch: pytest.MonkeyPatch, work: Any
) -> None:
    first = work()
    kept = {p.name: p.read_bytes() for p in fresh().folder.iterdir()}

    def measured(*_: Any) -> int:
        raise AssertionError("measured again")

    monkeypatch.setattr(Autotuner, "fastest", measured)
    second = work()
    assert {p.name: p.read_bytes() for p in fresh().folder.iterdir()} == kept
    if exact or work is not attention:
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("work", WORK)
def test_the_measured_choice_is_as_accurate_as_the_rule(fresh: Any, work: Any) -> None:
    by_rule = work()
    with deterministic(False):
        chosen = work()
    for a, b in zip(by_rule, chosen, strict=True):
        np.testing.assert_allclose(b, a, rtol=2**-7, atol=2**-7 * np.abs(a).max())


@pytest.mark.parametrize("work", WORK)
def test_a_choice_that_the_library_cannot_read_is_said_so_and_made_anew(
    fresh: Any, exact: bool, work: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = work()
    fresh()
    refused = b'{"x": 1, "w": 2, "y": 3}\nno plan' + b"\xff" * 32
    monkeypatch.setattr(AutotuneCache, "get", lambda *_: refused)
    for a, b in zip(want, work(), strict=True):
        np.testing.assert_allclose(b, a, rtol=2**-7, atol=2**-7 * np.abs(a).max())
    assert ("refused" in caplog.text) == (work is not product or not exact), "by the rule no algorithm is read"


def test_measuring_adds_to_what_was_there_once(fresh: Any) -> None:
    kernels = get_backend("cuda").kernels
    a, b = (kernels.xp.ones(s, "float32") for s in ((64, 256), (256, 32)))
    out = kernels.xp.full((64, 32), 5, "float32")
    with deterministic(False):
        kernels.matmul(a, b, out=out, plus=out)
    np.testing.assert_array_equal(get_backend("cuda").to_host(out), np.full((64, 32), 261.0))


def test_what_a_capture_meets_first_goes_by_the_rule(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = numbers(96, 64), numbers(64, 64, seed=1)
    out = flame.tensor(np.zeros((96, 64)), "bfloat16", "cuda")
    seen: list[bool] = []

    def step() -> None:  # the eager run is of other shapes
        y = F.linear(x if seen else x[:32], w)
        q = (x if seen else x[:32]).reshape(1, 1, -1, 64)
        y = y + F.scaled_dot_product_attention(q, q, q).reshape(-1, 64)
        out.data[: y.shape[0]] = y.data
        seen.append(True)

    with deterministic(False):
        step_once = flame.capture(step, "cuda")
        step_once()
        monkeypatch.setattr(Autotuner, "fastest", lambda *_: pytest.fail("measured in a capture"))
        step_once()
    with deterministic(True):
        q = x.reshape(1, 1, -1, 64)
        want = (F.linear(x, w) + F.scaled_dot_product_attention(q, q, q).reshape(-1, 64)).float().numpy()
    np.testing.assert_allclose(out.float().numpy(), want, rtol=2**-7, atol=2**-7 * np.abs(want).max())
