"""Python functions of numbers as ops: values and gradients of every elementary function, fusion, what is refused."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.gradcheck import numeric_gradient

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, y: (x + 2) * y - x / (y * y + 1) + 3 - -x + 1 / (x + 5),
    "powers": lambda x, y: x**2 + (y * y + 0.5) ** 1.5 + 2.0**x + (x * x + 0.3) ** y,
    "exponentials": lambda x, y: x.exp() + F.expm1(y) + F.log(x * x + 1) + (y * y).log1p() + F.sqrt(x * x + 1),
    "waves": lambda x, y: x.sin() * F.cos(y) + x.tanh() + F.sigmoid(y) + F.erf(x * y),
    "chosen": lambda x, y: F.where(x < y, x * x, y) + F.maximum(x, y) * 2 + abs(x) + F.clamp(y, -0.5, 0.5),
    "compared": lambda x, y: (x > 0) * y + (y <= x) * x,
    "activations": lambda x, y: (
        F.relu(x + 1) + F.silu(y) + F.gelu(x) + F.gelu(y, approximate="tanh") + F.softplus(x * 3) + F.leaky_relu(y, 0.2)
    ),
    "numpys": lambda x, y: np.exp(x) + np.maximum(x, y) - np.tanh(y) * np.float32(2.0) + np.square(x),
    "others": lambda x, y: F.lerp(x, y, 0.3) + F.reciprocal(x * x + 1) + F.rsqrt(y * y + 1) + F.square(y) - x.neg(),
}


def drawn(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(4, 5)) + 0.05, rng.normal(size=(5,))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_ops_and_gradients_of_finite_differences(name: str) -> None:
    fn = FUNCTIONS[name]
    made = flame.elementwise(fn)
    x, y = (flame.tensor(a, requires_grad=True) for a in drawn())
    weight = np.random.default_rng(5).normal(size=(4, 5))
    out = made(x, y)
    if name not in ("numpys", "compared"):
        np.testing.assert_allclose(out.numpy(), fn(x, y).numpy(), rtol=1e-12)
    (out * flame.tensor(weight)).sum().backward()
    for t in (x, y):
        with flame.no_grad():
            want = numeric_gradient(t, lambda: float((made(x, y).numpy() * weight).sum()))
        np.testing.assert_allclose(t.grad.numpy(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first run computes with what memory holds
def test_kernels_compute_the_same(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch forward and one for each gradient, in fp32 and bf16; compiled as C++."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    made = {name: flame.elementwise(fn) for name, fn in FUNCTIONS.items()}

    def results(name: str, device: str, dtype: Any) -> list[np.ndarray]:
        x, y = (flame.tensor(a.astype(np.float32), dtype, device, requires_grad=True) for a in drawn())
        y = y.detach().expand(4, 5).contiguous().requires_grad_()
        out = made[name](x, y)
        out.sum().backward()
        return [t.numpy().astype(np.float64) for t in (out, x.grad, y.grad)]

    for name in made:
        for dtype in ("float32", "bfloat16"):
            results(name, "cuda", dtype)
    compiled.build()
    for name in made:
        for dtype, limit in (("float32", 2e-5), ("bfloat16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps))):
            for got, want in zip(results(name, "cuda", dtype), results(name, "cpu", dtype), strict=True):
                np.testing.assert_allclose(got, want, rtol=limit, atol=limit, err_msg=f"{name} {dtype}")


def test_a_constant_needs_no_operands(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills what is given, also where rows lie apart, and nothing between them; compiled as C++."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)

    def filled() -> list[np.ndarray]:
        found = []
        for dtype, head in ((ml_dtypes.bfloat16, 128), (np.float32, 5)):
            block = gpu.to_device(np.ones((2, 9, 3, 4, head), dtype))
            gpu.kernels.elementwise(("0.f",), {}, (np.dtype(dtype),), out=(block[:, :, 1].transpose(0, 2, 1, 3),))
            found.append(gpu.to_host(block).astype(np.float32))
        return found

    filled()
    compiled.build()
    for block in filled():
        assert not block[:, :, 1].any()
        assert block[:, :, ::2].all()


def test_composed_functions_are_one_kernel() -> None:
    @flame.elementwise
    def inner(a, b=2.0):
        return F.silu(a) * b

    @flame.elementwise
    def outer(x, y):
        return inner(x + y) + inner(x, b=y)

    x, y = (flame.tensor(a) for a in drawn())
    want = F.silu(x + y) * 2.0 + F.silu(x) * y
    np.testing.assert_allclose(outer(x, y).numpy(), want.numpy(), rtol=1e-12)
    assert [k.impl for k in outer.op.kernels] == ["generated"]
    assert outer.in_c().count("sigmoid") == 2


def test_a_function_is_one_launch(gpu: Any) -> None:
    shifted = flame.elementwise(lambda x, by=1.0: F.relu(x + by))
    x, launched = flame.tensor(np.ones(70, np.float32), device="cuda"), list[str]()
    with gpu.kernels.launch_hooks.hooked(lambda name, _: launched.append(name)):
        shifted(x)
    assert len(launched) == 1
    assert flame.explain(shifted, x)[0] == ("generated", "chosen")


def test_equal_parts_are_computed_once() -> None:
    made = flame.elementwise(lambda x: F.exp(x * 2) + F.exp(x * 2) * F.exp(3 * x))
    assert made.in_c().count("e_to") == 2


def test_numbers_defaults_and_saved_values() -> None:
    made = flame.elementwise(lambda x, slope=0.5: F.where(x > 0, x, slope * x))
    x = flame.tensor([-2.0, 2.0], requires_grad=True)
    assert made(x).tolist() == [-1.0, 2.0]
    assert made(x, 0.25).tolist() == [-0.5, 2.0]
    assert made(x, slope=flame.tensor([1.0, 7.0])).tolist() == [-2.0, 2.0]
    node = flame.elementwise(lambda a, b: a + b.exp())(x, x)._node
    assert set(node.saved) == {"b"}  # the gradient of a sum asks for nothing of a


def test_what_where_left_out_sends_no_nan_back() -> None:
    x = flame.tensor([0.0, 4.0], requires_grad=True)
    flame.elementwise(lambda v: F.where(v > 0, F.sqrt(v), 0.0))(x).sum().backward()
    assert x.grad.tolist()[1] == 0.25


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda x: x if x > 0 else -x, "must not branch on a value: use F.where"),
        (lambda x: 3.0, "expected the function to return a number made of its arguments, got 3.0"),
        (lambda x: (x, x), "expected the function to return a number"),
        (lambda *x: x[0], r"argument '\*x' cannot be named in a kernel"),
        (lambda float: float, "argument 'float' cannot be named"),
        (lambda x: F.softmax(x, 0), "softmax: not known in an elementwise function"),
        (lambda x: x + flame.tensor([1.0]), "expected"),
        (lambda x: F.div(x, 2, rounding_mode="trunc"), "rounding_mode 'trunc' is not known"),
    ],
)
def test_what_cannot_be_a_kernel_is_refused_when_declared(fn: Callable[..., Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        flame.elementwise(fn)


def test_a_method_that_is_not_known_is_named() -> None:
    with pytest.raises(AttributeError, match="knows no 'cumsum'"):
        flame.elementwise(lambda x: x.cumsum(0))


def test_examples_hold() -> None:
    assert doctest.testmod(importlib.import_module("flame_train.engine.elementwise_op")).failed == 0
