"""Group norms whose blocks wait for each other, on the card: values, and the same bits however the blocks come."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.gradcheck import generator

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 32, 32, 1280),
    (4, 64, 64, 640),
    (4, 128, 128, 320),
    (2, 128, 128, 960),
    (1, 9, 7, 2560),
    (5, 40, 40, 72),
    (67, 8, 8, 64),
    (140, 3, 5, 64),
    (1, 64, 64, 3072),
]
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
Found = list[flame.Tensor]


def made(shape: tuple[int, ...], dtype: np.dtype, device: str, kind: np.dtype) -> Callable[[], Found]:
    """What computes the output and the gradients of input, weight and bias."""
    rng, c = generator("group norm", sum(shape)), shape[-1]
    drawn = [2.0 + rng.standard_normal(shape, np.float32), *(rng.standard_normal(c, np.float32) for _ in range(2))]
    x, w, b = (flame.tensor(v.astype(dtype), kind, device, requires_grad=True) for v in drawn)
    cotangent = flame.tensor(rng.standard_normal(shape, np.float32).astype(dtype), kind, device)

    def call() -> Found:
        y = F.group_norm_silu(x, 8, w, b, layout="NHWC")
        return [y.detach(), *flame.grad(y, [x, w, b], [cotangent])]

    return call


def distance(got: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_bits(shape: tuple[int, ...], dtype: np.dtype) -> None:
    truth = [t.numpy() for t in made(shape, dtype, "cpu", np.dtype(np.float64))()]
    call = made(shape, dtype, "cuda", dtype)
    found = [[t.numpy() for t in call()] for _ in range(6)]
    for again in found[1:]:
        for first, same in zip(found[0], again, strict=True):
            np.testing.assert_array_equal(first, same)
    room = 4e-6 + 2.0 * float(ml_dtypes.finfo(dtype).eps)  # fp32 sums, and mean and result in the dtype
    assert max(distance(g, t) for g, t in zip(found[0], truth, strict=True)) < room
    assert not (get_backend("cuda").kernels.barriers.get() & 0x7FFFFFFF).any(), "all who came have gone"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_two_inputs_and_a_shift_are_those_put_together(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Not rounded in between, so against fp64; gradients held for each input, and wanted of one alone as well."""
    rng, split = generator("joined", sum(shape)), shape[-1] - shape[-1] // 24 * 8
    whole, cotangent = (2.0 + rng.standard_normal(shape, np.float32) for _ in range(2))
    drawn = [whole[..., :split], whole[..., split:], *(rng.standard_normal(shape[-1], np.float32) for _ in range(2))]
    drawn.append(rng.standard_normal((shape[0], shape[-1]), np.float32))

    def found(device: str, kind: np.dtype) -> list[np.ndarray]:
        a, b, w, c, s = (flame.tensor(v.astype(dtype), kind, device, requires_grad=i < 4) for i, v in enumerate(drawn))
        y = F.cat_group_norm_silu(a, b, 8, w, c, s)
        g = flame.tensor(cotangent.astype(dtype), kind, device)
        both = flame.grad([y, a, b], [a, b, w, c], [g, a.detach(), b.detach()], retain_graph=True)
        return [t.numpy() for t in (y.detach(), *both, *flame.grad(y, [b], [g]))]

    room = 4e-6 + 2.0 * float(ml_dtypes.finfo(dtype).eps)
    for got, truth in zip(found("cuda", dtype), found("cpu", np.dtype(np.float64)), strict=True):
        assert distance(got, truth) < room


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_with_the_least_shared_memory_there_is(dtype: np.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_backend("cuda").kernels, "shared_bytes", 99 << 10)
    for shape in (SHAPES[1], SHAPES[8]):
        test_values_and_bits(shape, dtype)


def test_many_after_one_another() -> None:
    """Blocks of one kernel never take those of the kernel before for their own."""
    shapes = SHAPES[:3]
    calls = [made(shape, DTYPES[1], "cuda", DTYPES[1]) for shape in shapes]
    alone = [[t.numpy() for t in call()] for call in calls]
    queued = [[call() for call in calls] for _ in range(20)]
    for round_ in queued:
        for found, expected in zip(round_, alone, strict=True):
            for got, want in zip(found, expected, strict=True):
                np.testing.assert_array_equal(got.numpy(), want)
