"""Formulas over single numbers, read once and compiled: the bits of the same formulas over NumPy's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.codegen.scalars import Trace

GIVEN = {
    "d": np.array(-2.625),
    "e": np.array(0.3),
    "f": np.array(1.7, np.float32),
    "n": np.array(7),
    "yes": np.array(True),
    "many": np.linspace(0.0, 1.0, 1001) ** 3,
    "bad": np.array([1.0, np.nan], np.float32),
}


def formula(xp: Any, x: Any) -> dict[str, Any]:
    d, e, f, n, yes = (x[name] for name in ("d", "e", "f", "n", "yes"))
    t = n.astype(np.float64)
    return {
        "sums": 1.0 + d - e * 3.0 + (0.1 - d) / e + 2.0 / d,
        "mixed": f * d + t,
        "narrow": f * np.float32(0.1) + f / 3.0 - 0.7 * f,
        "whole": n * 3 - 2 + yes,
        "rest": (2.7 * t) % 1.0,
        "rounded": d.astype(np.float32),
        "root": xp.sqrt(e),
        "narrow root": xp.sqrt(f),
        "least": xp.minimum(0.25, xp.maximum(d, e)),
        "within": xp.clip(t, 0.0, 1.0),
        "chosen": xp.where(yes & (d < e) & ~(n >= 8), f, np.float32(2.0)),
        "other": xp.where(n == 8, 0.0, xp.where(e <= 0.3, e, d)),
        "finite": xp.isfinite(f) & xp.isfinite(d / 0.0 if xp is not np else np.float64(np.inf)),
        "all fine": xp.isfinite(x["many"]).all(),
        "not all": xp.isfinite(x["bad"]).all(),
        "itself": yes.all(),
    }


def inexact(xp: Any, x: Any) -> dict[str, Any]:
    """What is another library's or another order."""
    return {"cos": xp.cos(x["d"]), "power": (1.0 + x["e"]) ** -0.275, "base": 0.9 ** x["e"], "sum": xp.sum(x["many"])}


@pytest.mark.parametrize(("of", "tolerance"), [(formula, 0.0), (inexact, 1e-14)])
def test_a_program_gives_the_formulas_bits(
    gpu: Any, of: Any, tolerance: float, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    given, wanted = (
        {n: gpu.to_device(a) for n, a in GIVEN.items()},
        {n: np.asarray(v) for n, v in of(np, GIVEN).items()},
    )
    into = {n: gpu.empty((), v.dtype) for n, v in wanted.items()}
    gpu.kernels.scalars.program(of, given, into)
    compiled.build()
    gpu.kernels.scalars.program(of, given, into)(given, into)
    for name, value in wanted.items():
        np.testing.assert_allclose(gpu.to_host(into[name]), value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_result_may_take_an_operands_place_and_another_type(
    gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    a, b = gpu.to_device(np.array(3)), gpu.to_device(np.array(5.5))
    given = into = {"a": a, "b": b}

    def swapped(xp: Any, x: Any) -> dict[str, Any]:
        return {"a": x["b"], "b": x["a"]}

    gpu.kernels.scalars.program(swapped, given, into)
    compiled.build()
    gpu.kernels.scalars.program(swapped, given, into)(given, into)
    assert (gpu.to_host(a), gpu.to_host(b)) == (5, 3.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda xp, x: 1 if x["n"] == 7 else 2, "xp.where"),
        (lambda xp, x: x["n"] / 2, "cast"),
        (lambda xp, x: ~x["n"], "truth values"),
        (lambda xp, x: x["d"] * float("inf"), "finite"),
    ],
)
def test_what_no_kernel_can_hold_is_refused(gpu: Any, wrong: Any, message: str) -> None:
    given = {n: gpu.to_device(a) for n, a in GIVEN.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        gpu.kernels.scalars.program(lambda xp, x: {"n": wrong(xp, x)}, given, given)


def test_a_trace_asks_numpy_for_types() -> None:
    trace = Trace()
    made = {kind: trace.noted(np.dtype(kind), "x") for kind in ("bool", "int64", "float32", "float64")}
    for (a, x), (b, y) in [(p, q) for p in made.items() for q in made.items() if {p[0], q[0]} != {"bool"}]:
        assert (x * y).dtype == (np.ones((), a) * np.ones((), b)).dtype
