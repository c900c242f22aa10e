"""The kernels that sort, run as C++ without a GPU (machine.cpp). Values and places are those of NumPy's stable sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import bfloat16, float16, float32
from flame_train.engine.shape_run import shape_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

DTYPES = [float32, bfloat16, float16]
Drawn = np.ndarray[Any, Any]


def drawn(shape: tuple[int, ...], kind: str, dtype: Any) -> Drawn:
    """Numbers in which a sort may err."""
    rng = np.random.default_rng(len(kind))
    x = rng.standard_normal(shape)
    if kind == "equal":
        return rng.integers(0, 3, shape).astype(dtype)
    if kind == "one":
        return np.full(shape, 0.5, dtype)
    if kind == "any bits":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)
    if kind == "zeros":
        return np.copysign(np.where(rng.random(shape) < 0.7, 0.0, x), rng.standard_normal(shape)).astype(dtype)
    if kind == "tiny":
        return (rng.integers(-3, 4, shape) * np.nextafter(dtype.type(0), dtype.type(1)).astype(np.float64)).astype(
            dtype
        )
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.where(rng.random(shape) < 0.1, value, x)
    return x.astype(dtype)


def expected(x: Drawn, dim: int, descending: bool) -> tuple[Drawn, Drawn]:
    """By numbers that are equal where the values count as equal: fp64 without a sign of 0, NaN above infinity."""
    rows = np.moveaxis(x, dim, -1).astype(np.float64)
    nan = np.isnan(rows)
    keys = np.stack([nan.astype(np.float64), np.where(nan, 0.0, rows) + 0.0])
    index = np.lexsort((-keys if descending else keys)[::-1], axis=-1)
    values = np.take_along_axis(np.moveaxis(x, dim, -1), index, -1)
    return np.moveaxis(values, -1, dim), np.moveaxis(index, -1, dim)


def bits(x: Drawn, rows: bool) -> Drawn:
    """Those of dense values; of others, which are copied into rows and back, NaN stays NaN but not the same one."""
    made = np.ascontiguousarray(x) if rows else np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return made.view(f"u{x.dtype.itemsize}")


SHAPES = [((3, 1), -1), ((2, 77), -1), ((2, 300), 1), ((1, 4096), -1), ((2, 4097), 1), ((1, 36_871), 1)]
LINES = [((2, 70, 3), 1), ((4099, 2), 0)]
KINDS = ["equal", "one", "any bits", "zeros", "tiny", "not finite"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first run leaves what memory holds; NaN that signal
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_values_and_places(gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    few = {36_871: ("any bits", "not finite"), 4096: ("equal", "any bits")}
    cases = [
        (drawn(shape, kind, dtype), dim, descending)
        for shape, dim in SHAPES + LINES * (dtype != float16)  # transposed by a kernel that C++ has for no fp16
        for kind in few.get(shape[-1], KINDS)
        for descending in (False, True)
    ]

    def found() -> list[tuple[Drawn, Drawn]]:
        made = (F.sort(flame.tensor(x, device="cuda"), dim, descending) for x, dim, descending in cases)
        return [(values.numpy(), index.numpy()) for values, index in made]

    found()
    compiled.build()
    for (x, dim, descending), (values, index) in zip(cases, found(), strict=True):
        want, places = expected(x, dim, descending)
        np.testing.assert_array_equal(index, places)
        rows = dim in (-1, x.ndim - 1)
        np.testing.assert_array_equal(bits(values, rows), bits(want, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_what_a_sort_holds_meanwhile(dtype: Any) -> None:
    """Beside the results a copy of the values, their places in 32 bits and counts: passes use the results' memory."""
    shape = (64, 151_936)
    size, tiles = 64 * 151_936, 64 * 38
    with shape_run() as run:
        x = flame.tensor(np.ones(shape, dtype), device="cuda")
        begun = run.peak_bytes
        values, index = F.sort(x, -1, True)
        assert (values.shape, index.shape, index.dtype) == (shape, shape, np.int64)
        assert run.peak_bytes - begun == size * (2 * dtype.itemsize + 8 + 4) + tiles * 256 * 4


def test_many_of_the_first_are_those_of_the_sort() -> None:
    with shape_run():
        x = flame.tensor(np.ones((9000, 4), np.float32), device="cuda")
        assert [impl for impl, why in explain(F.topk, x, 5000, 0) if why == "chosen"] == ["sorted"]
        assert [t.shape for t in F.topk(x, 5000, 0)] == [(5000, 4)] * 2
