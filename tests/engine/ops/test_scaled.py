"""Weights of 8 bits: rounding against ml_dtypes' and NumPy's, layers against products of what it rounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flame_train.engine as flame
from flame_train.engine import functional as F

E4M3 = ml_dtypes.float8_e4m3fn


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def by_ml_dtypes(x: np.ndarray) -> np.ndarray:
    """Each row by the smallest power of two that leaves it at most 448, rounded, and back: all in fp64."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 448) / 448)))
    return (x / scale).astype(np.float32).astype(E4M3).astype(np.float64) * scale


def by_whole_numbers(x: np.ndarray) -> np.ndarray:
    """Each row in 127ths of its largest magnitude, in x's dtype, rounded, and back with a factor in fp32."""
    largest = np.maximum(np.abs(x).max(-1, keepdims=True), x.dtype.type(2.0**-100))
    whole = np.round(x * (x.dtype.type(127) / largest))
    assert np.abs(whole).max(initial=0) <= 127
    return whole.astype(np.float64) * (largest / x.dtype.type(127)).astype(np.float32)


ROUNDED = {"fp8": by_ml_dtypes, "int8": by_whole_numbers}
QUANTIZE = {"fp8": F.fp8_quantize, "int8": F.int8_quantize}


def dequantize(data: flame.Tensor, scales: flame.Tensor) -> np.ndarray:
    stored = data.numpy()
    numbers = (stored.view(E4M3) if stored.dtype == np.uint8 else stored).astype(np.float64)
    return numbers * scales.numpy().view(np.float32)[..., None]


ROWS = {
    "normal": normal(7, 33),
    "tiny": normal(3, 16) * 1e-12,
    "huge": normal(3, 16) * 1e12,
    "zeros": np.zeros((2, 5), np.float32),
    "wide range": normal(4, 64) * np.exp2(np.arange(64) - 50).astype(np.float32),
    "the edge": np.float32([[448, 1, -3], [448.00003, 1, -3], [-447.99997, 2.5, 0], [896, -0.0, 2**-9 * 1.5]]),
    "ties": np.float32([[448, 17, 19, 2**-9 * 0.5, 2**-9 * 1.5, -(2**-9) * 2.5, 2**-6 * 0.9375, 240 + 8]]),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("stored", ROUNDED)
def test_rounds_as_ml_dtypes_and_numpy_do(name: str, dtype: Any, stored: str) -> None:
    x = ROWS[name].astype(dtype)
    assert np.array_equal(dequantize(*QUANTIZE[stored](flame.tensor(x))), ROUNDED[stored](x))


@example([2.0**90, 225.0 * 2.0**82])
@example([2.3021538855789334e22, 1.083197608161684e27])
@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=40))
def test_errs_by_a_sixteenth_at_most(row: list[float]) -> None:
    x = np.float64(np.float32(row))[None]
    error = np.abs(dequantize(*F.fp8_quantize(flame.tensor(x))) - x)
    # Half a step of the smallest numbers, 2^-10 factors. The largest is more than 224 of them; factors end at 2^-100.
    least = max(np.abs(x).max() / 224 * 2.0**-10, 2.0**-110)
    assert (error <= np.maximum(np.abs(x) / 16, least)).all()


@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=40))
def test_whole_numbers_err_by_half_a_step_at_most(row: list[float]) -> None:
    x = np.float64(np.float32(row))[None]
    error = np.abs(dequantize(*F.int8_quantize(flame.tensor(x.astype(np.float32)))) - x)
    assert (error <= np.maximum(np.abs(x).max(), 2.0**-100) / 254 * (1 + 2.0**-14)).all()


def test_what_an_fp8_file_holds_is_kept_to_the_bit() -> None:
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    rows = np.stack([every[np.isfinite(every)], every[np.isfinite(every)] * 2.0**-14])
    assert np.array_equal(dequantize(*F.fp8_quantize(flame.tensor(rows))), rows)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("stored", QUANTIZE)
def test_a_row_that_is_not_finite_comes_to_no_number(bad: float, stored: str) -> None:
    x = normal(3, 8)
    x[1, 4] = bad
    back = dequantize(*QUANTIZE[stored](flame.tensor(x)))
    assert np.isnan(back[1]).all()
    assert np.isfinite(back[[0, 2]]).all()


def layer(stored: str, device: str, dynamic: bool, dtype: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs and gradients of an adapted pair of layers and of a plain one, and what they should be in fp64."""
    x, g, h = (normal(40, n, dtype=dtype).astype(np.float64) for n in (32, 48, 48))
    weights = [normal(48, 32), normal(48, 32) * 3]
    bias, residual = normal(48, dtype=dtype).astype(np.float64), normal(40, 48, dtype=dtype).astype(np.float64)
    downs = [normal(n, 32, dtype=dtype).astype(np.float64)[:4] for n in (4, 5)]
    ups = [normal(48, n, dtype=dtype).astype(np.float64)[:, :4] for n in (4, 5)]
    on = {"device": device}
    data, scales = zip(*[QUANTIZE[stored](flame.tensor(w, **on)) for w in weights], strict=True)
    leaf = {
        n: flame.tensor(v, dtype, device, requires_grad=True) for n, v in {"x": x, "b": bias, "r": residual}.items()
    }
    factors = [[flame.tensor(m, dtype, device, requires_grad=True) for m in each] for each in (downs, ups)]
    cotangents = [flame.tensor(v, dtype, device) for v in (g, h)]
    plain = F.scaled_linear(leaf["x"], data[0], scales[0], leaf["b"], leaf["r"], dynamic=dynamic)
    pair = F.scaled_lora_linears(leaf["x"], data, scales, *factors, 0.5, dynamic=dynamic)
    got = [plain, *pair, *flame.grad(plain, [leaf["x"], leaf["b"]], [cotangents[0]])]
    got += flame.grad(pair, [leaf["x"], *factors[0], *factors[1]], cotangents)

    rounded = ROUNDED[stored]
    ws = [rounded(w) for w in weights]
    seen = rounded(x) if dynamic else x
    # A gradient's column takes its row's factor along before it is rounded.
    scale = np.concatenate([s.numpy().view(np.float32) for s in scales]).astype(np.float64)
    whole = np.concatenate([g, h], 1)

    def back(rows: np.ndarray, n: int) -> np.ndarray:
        return (rounded(rows * scale[:n]) if dynamic else rows * scale[:n]) / scale[:n]

    lows = [x @ d.T * 0.5 for d in downs]
    want = [seen @ ws[0].T + bias + residual]
    want += [seen @ w.T + low @ u.T for w, low, u in zip(ws, lows, ups, strict=True)]
    want += [back(g, 48) @ ws[0], g.sum(0)]
    inner = [v @ u * 0.5 for v, u in zip((g, h), ups, strict=True)]
    want.append(back(whole, 96) @ np.concatenate(ws) + sum(i @ d for i, d in zip(inner, downs, strict=True)))
    want += [i.T @ x for i in inner] + [v.T @ low for v, low in zip((g, h), lows, strict=True)]
    return [np.asarray(t.numpy(), np.float64) for t in got], want


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("stored", ROUNDED)
def test_layers_multiply_what_is_rounded(stored: str, dynamic: bool) -> None:
    for got, want in zip(*layer(stored, "cpu", dynamic, np.float64), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("stored", "lost"), [("fp8", 0.05), ("int8", 0.015)])
def test_the_rounded_rows_are_near_the_rows(stored: str, lost: float) -> None:
    """Of what a layer makes few hundredths are lost, by either rounding, and of its gradient."""
    rounded, exact = layer(stored, "cpu", True, np.float64)[0], layer(stored, "cpu", False, np.float64)[0]
    for got, want in zip(rounded, exact, strict=True):
        assert np.linalg.norm(got - want) < lost * np.linalg.norm(want)


def test_sums_of_whole_numbers_are_exact() -> None:
    """Of fp32 inputs, far beyond fp32's 2^24: each output is its whole number, by the factors of row and column."""
    rng = np.random.default_rng(5)
    x, w = (rng.uniform(100, 127, (n, 4096)).astype(np.float32) for n in (3, 5))
    (rows, by), (data, scales) = (F.int8_quantize(flame.tensor(a)) for a in (x, w))
    sums = rows.numpy().astype(np.int32) @ data.numpy().astype(np.int32).T
    assert sums.min() > 2**25
    want = sums.astype(np.float32) * by.numpy().view(np.float32)[:, None] * scales.numpy().view(np.float32)
    np.testing.assert_array_equal(F.scaled_linear(flame.tensor(x), data, scales, dynamic=True).numpy(), want)


@pytest.mark.parametrize("name", ["float64", "bf16", "float16"])
def test_stored_numbers_are_given_back_in_what_is_asked_for(name: str) -> None:
    back = F.scaled_dequantize(*F.fp8_quantize(flame.tensor(ROWS["normal"])), name)
    assert back.dtype == flame.tensor(0.0, name).dtype
    np.testing.assert_array_equal(back.numpy().astype(np.float64), by_ml_dtypes(ROWS["normal"]))
