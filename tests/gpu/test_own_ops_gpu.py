"""Own ops and kernels on the GPU: elementwise functions, primitives and CUDA C, by themselves and captured."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from tests.engine.backend.test_cuda_kernel import SOURCE
from tests.engine.backend.test_elementwise import FUNCTIONS, drawn
from tests.engine.backend.test_own_ops import registry, run

__all__ = ["registry"]
pytestmark = pytest.mark.gpu


def results(fn: Any, device: str, dtype: str) -> list[np.ndarray]:
    x, y = (flame.tensor(a.astype(np.float32), dtype, device, requires_grad=True) for a in drawn())
    out = fn(x, y)
    out.sum().backward()
    return [t.float().numpy() for t in (out, x.grad, y.grad)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_elementwise_function_is_what_it_is_on_the_cpu(name: str, dtype: str) -> None:
    fn = flame.elementwise(FUNCTIONS[name])
    limit = 2e-5 if dtype == "float32" else 4 * float(ml_dtypes.finfo(dtype).eps)  # y's gradient is a sum
    for got, want in zip(results(fn, "cuda", dtype), results(fn, "cpu", dtype), strict=True):
        np.testing.assert_allclose(got, want, rtol=limit, atol=limit)


def test_an_elementwise_function_is_one_launch() -> None:
    @flame.elementwise
    def shifted(x, by=1.0):
        return F.relu(x + by)

    x, launched = flame.randn(1000, device="cuda"), list[str]()
    shifted(x)
    kernels = get_backend("cuda").kernels
    with kernels.launch_hooks.hooked(lambda name, _: (launched.append(name), True)[1]):
        shifted(x)
    assert len(launched) == 1


def test_a_captured_step_of_own_ops_is_the_eager_one(registry: None) -> None:
    """An elementwise function, a primitive with a kernel of its own, and CUDA C, with their gradients."""
    softcap = run("kernel", run("primitive", {}))["softcap"]
    shifted = flame.elementwise(lambda x, by=0.5: F.silu(x + by))
    scale = flame.cuda_kernel(SOURCE, "scale")
    x = flame.tensor(np.linspace(-90, 90, 301, dtype=np.float32), device="cuda", requires_grad=True)
    assert ("mine", "chosen") in flame.explain(softcap, x)
    out, scaled, grad = (flame.zeros(301, device="cuda") for _ in range(3))

    def step() -> None:
        y = softcap(shifted(x))
        (g,) = flame.grad(y.sum(), [x])
        out.copy_(y.detach())
        grad.copy_(g)
        scale(10, 32, out, scaled, 2.0, 301)

    def found() -> list[np.ndarray]:
        return [t.numpy().copy() for t in (out, scaled, grad)]

    step()
    eager = found()
    captured = flame.capture(step, "cuda")
    for _ in range(4):  # eager, recorded, and replayed
        for t in (out, scaled, grad):
            t.zero_()
        captured()
        for got, want in zip(found(), eager, strict=True):
            np.testing.assert_array_equal(got, want)
    host = flame.tensor(x.numpy(), requires_grad=True)
    softcap(shifted(host)).sum().backward()
    np.testing.assert_allclose(eager[0], softcap(shifted(host)).numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(eager[1], 2 * eager[0])
    np.testing.assert_allclose(eager[2], host.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_an_own_op_passes_gradcheck(registry: None) -> None:
    softcap = run("kernel", run("primitive", {}))["softcap"]
    assert flame.check.op(softcap, "cuda") < 1e-6


def test_the_compilers_message_has_the_line_of_the_source() -> None:
    """At the declaration, for a machine with a GPU has NVRTC."""
    with pytest.raises(SyntaxError, match=r'line 5: error.*"nothing".*\n    if \(i < n\)'):
        flame.cuda_kernel(SOURCE.replace("by * x[i]", "by * nothing[i]"), "scale")
